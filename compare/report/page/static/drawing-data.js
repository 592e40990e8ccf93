// The drawing's data, and helpers that other parts of the drawing use.
xlafuse.drawn = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_BUFFERS = 12; // listed for a kernel
  const KINDS = { gemm: "gemm", attention: "attention", reduction: "reduction", elementwise: "elementwise",
    copy: "copy", memset: "copy" };

  function path(className, d, width) {
    const node = document.createElementNS(SVG, "path");
    node.setAttribute("class", className);
    node.setAttribute("d", d);
    node.style.strokeWidth = `${width}px`;
    return node;
  }

  function breakable(node, text) {
    // Long names of compilers break best after an underscore or a dot.
    text.split(/(?<=[_./])(?=\w)/).forEach((piece, i) => node.append(...(i ? [document.createElement("wbr")] : []), piece));
    return node;
  }

  const count = (many, one) => `${many.toLocaleString("en")} ${one}${many === 1 ? "" : "s"}`;

  const kindOf = (kernel) => KINDS[kernel.work] || "other";

  // Return one layout of the data: grouped bands merged, buffers and reasons by name instead of position.
  function resolved(data, layout) {
    const bands = layout.groups.map((group) => {
      const labels = group.map((band) => data.bands[band].label);
      if (group.length === 1) return data.bands[group[0]];
      return { ...data.bands[group[0]], label: `${labels[0]} … ${labels.at(-1)}`, several: labels };
    });
    const together = (ops) => {
      const found = ops[""] === undefined ? {} : { "": ops[""] };
      layout.groups.forEach((group, number) => {
        const own = group.filter((band) => band in ops);
        if (own.length) found[number] = own.map((band) => ops[band]).filter(Boolean).join(", ");
      });
      return found;
    };
    const columns = data.columns.map((column, c) => {
      const buffer = ([place, part]) => {
        const [text, , role] = column.buffers[place];
        return `${part ? `${part} of ` : ""}${text}${role === "intermediate" ? "" : `, ${role}`}`;
      };
      const accesses = (list) => (list === null ? ["unknown"]
        : [...list.slice(0, MOST_BUFFERS).map(buffer), ...(list.length > MOST_BUFFERS ? [`and ${list.length - MOST_BUFFERS} smaller ones`] : [])]);
      return { ...column, folds: layout.columns[c].folds,
        kernels: column.kernels.map((kernel, k) => ({ ...kernel, time: kernel.time && `${kernel.time} µs`, pieces: layout.columns[c].pieces[k], ops: together(kernel.ops),
          stages: kernel.ops, reads: accesses(kernel.reads), writes: accesses(kernel.writes) })),
        edges: column.edges.map((edge) => {
          const [text, bytes, role] = column.buffers[edge.buffer];
          return { ...edge, text, bytes, role, why: edge.why.map((place) => column.reasons[place]) };
        }) };
    });
    return { ...data, bands, columns, stages: data.bands };
  }

  return { SVG, path, breakable, count, kindOf, resolved };
})();
