// The kernels of a case as tables, and the values of the chart of kernels. The data of the drawing
// (compare/report/page/drawing/drawing.py) describe each kernel.
xlafuse.kernels = (() => {
  "use strict";
  const { make } = xlafuse;
  const { breakable, count, kindOf } = xlafuse.drawn;
  const MOST_LINES = 4;
  const tables = new WeakMap(); // an implementation's fold -> the function that makes its table

  // Return the kernels of each implementation, in launch order.
  function kernelsOf(data) {
    const stages = ({ ops }) => Object.keys(ops).filter((band) => band !== "").map((band) => data.bands[band].label).join(", ");
    return new Map((data?.columns ?? []).map((column) => [column.name,
      column.kernels.map((kernel) => ({ ...kernel, stages: stages(kernel) }))]));
  }

  // Show a fold for each implementation with kernels; its table is made when it opens.
  // timed: the kernels have times. priced: their device's bandwidth is known, so they have roofline times.
  function show(slot, data, { timed, priced }) {
    slot.replaceChildren();
    for (const [implementation, kernels] of kernelsOf(data)) {
      if (!kernels.length) continue;
      const fold = make("details", "kernels");
      fold.dataset.implementation = implementation;
      fold.append(make("summary", "", `${implementation}: ${count(kernels.length, "kernel")} as a table`));
      fold.addEventListener("toggle", () => fold.open && open(fold));
      tables.set(fold, () => table(implementation, kernels, { timed, priced }));
      slot.append(fold);
    }
  }

  function open(fold) {
    const fill = tables.get(fold);
    if (fill) fold.append(fill());
    tables.delete(fold);
    fold.open = true;
  }

  function table(implementation, kernels, { timed, priced }) {
    const heads = [["#", "num"], ["kernel"], ["kind"], ["stages"], ["source"], ["launches", "num"], ["reads", "num"], ["writes", "num"],
      ["FLOPs", "num"], ...(timed ? [["µs", "num"]] : []), ...(priced ? [["roofline µs", "num"]] : []),
      ...(timed && priced ? [["recoverable µs", "num"]] : []), ...(priced ? [["bound"]] : [])];
    const node = make("table", "plain");
    const head = node.createTHead().insertRow();
    for (const [text, className] of heads) head.append(make("th", className, text, { scope: "col" }));
    const body = node.createTBody();
    kernels.forEach((kernel, index) => {
      const row = body.insertRow();
      row.dataset.implementation = implementation;
      row.dataset.index = index;
      const link = make("a", "kernel mono", undefined, { href: "#c-sources" });
      Object.assign(link.dataset, { kernel: index, implementation });
      const name = make("td");
      name.append(breakable(link, kernel.name));
      const kind = make("td", "", kernel.kind);
      if (kernel.phase === "backward") kind.append(" ", make("span", "muted", kernel.phase));
      const number = (text) => make("td", "num", text);
      row.append(number(index + 1), name, kind, make("td", "", kernel.stages),
        make("td", "mono path", kernel.lines.slice(0, MOST_LINES).join(", ")), number(kernel.launches), number(kernel.read), number(kernel.written),
        number(kernel.flops), ...(timed ? [number(kernel.time)] : []), ...(priced ? [number(kernel.roofline_time || "?")] : []),
        ...(timed && priced ? [number(kernel.roofline_time ? kernel.recoverable : "?")] : []), ...(priced ? [make("td", "", kernel.bound)] : []));
    });
    const scroll = make("div", "scroll");
    scroll.append(node);
    return scroll;
  }

  // Open a kernel's fold and return its row; undefined if there is none.
  function row(slot, { implementation, index }) {
    const fold = [...slot.children].find((each) => each.dataset.implementation === implementation);
    if (fold) open(fold);
    return fold?.querySelector(`tr[data-index="${index}"]`);
  }

  // Return the values of the chart: bars (compare/report/page/content/kernels.py) with times in µs and tooltips.
  function values(bars, data) {
    const kernels = kernelsOf(data);
    return bars.flatMap(({ implementation, index, gap, took, helpers }) => {
      let end = 0;
      return index.map((own, i) => {
        const start = end + gap[i];
        end = start + took[i];
        return { implementation, index: own, start: start / 1e3, end: end / 1e3, took: `${(took[i] / 1e3).toPrecision(4)} µs`,
          ...(own === null ? helper(helpers[i]) : described(own, kernels.get(implementation)?.[own])) };
      });
    });
  }

  const helper = (name) => ({ kind: "other", kernel: `${name} (helper launch)`, stages: "", reads: "", writes: "", "roofline time": "", bound: "" });

  function described(index, kernel) {
    if (!kernel) return { ...helper(""), kernel: `${index + 1}.` }; // the graph is too large to draw
    return { kind: kindOf(kernel), kernel: `${index + 1}. ${kernel.name}`, stages: kernel.stages, reads: kernel.read, writes: kernel.written,
      "roofline time": kernel.roofline_time ? `${kernel.roofline_time} µs` : "?", bound: kernel.bound };
  }

  return { show, open, row, values };
})();
