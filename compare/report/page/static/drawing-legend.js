// The legend of the drawing, and its content as tables.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const { count, make } = xlafuse;
  const { kindOf } = xlafuse.drawn;

  function legend(state) {
    const { legend: node, columns } = state;
    node.replaceChildren();
    const swatch = (className, text, style = {}) => {
      const item = make("span", "dr-key");
      const mark = make("span", `dr-swatch ${className}`);
      Object.assign(mark.style, style);
      item.append(mark, text);
      node.append(item);
    };
    const kinds = new Set(columns.flatMap((column) => column.kernels.map(kindOf)));
    for (const kind of kinds) swatch("", kind, { background: `var(--kind-${kind})` });
    swatch("dr-flow", "buffer between kernels, as wide as its bytes");
    if (columns.some((column) => column.edges.some((edge) => edge.role === "saved"))) swatch("dr-flow dr-dash", "saved for backward");
    swatch("dr-flow dr-grey", "inputs of the block (at the left) and outputs (arrow)");
    if (columns.some((column) => column.kernels.some((kernel) => kernel.us))) swatch("dr-thin", "time, relative to the longest kernel");
    const minor = columns.reduce((sum, column) => sum + column.minor, 0);
    if (minor) node.append(make("span", "dr-key", `${count(minor, "buffer")} under 2% of the largest: drawn only with the chosen kernel`));
  }

  function table(state) {
    const details = make("details", "dr-table");
    details.append(make("summary", "", "The drawing as tables"));
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      const data = state.views.at(-1); // the layout without groups
      const stages = grid(["stage", ...data.columns.map((column) => column.name)], data.bands.map((band, b) => [
        band.phase === "backward" ? `backward: ${band.label}` : band.label,
        ...data.columns.map((column) => column.cells[b])]), "Stages and the kernels that compute them, compared with the first column that computes the stage");
      const buffers = grid(["implementation", "buffer", "role", "from", "to"], data.columns.flatMap((column) =>
        column.edges.map((edge) => [column.name, edge.text, edge.role, edge.from + 1, edge.to + 1])),
        "Buffers that one kernel writes and another reads");
      details.append(stages, buffers);
    });
    return details;
  }

  function grid(heads, lines, caption) {
    const scroll = make("div", "dr-tablescroll", undefined, { tabindex: "0", role: "region", "aria-label": caption });
    const node = xlafuse.table("", heads.map((text) => [text]), lines);
    node.prepend(make("caption", "", caption));
    scroll.append(node);
    return scroll;
  }

  return { legend, table };
})());
