// The kernels of a case as tables, and the values of the chart of kernels. The data of the drawing
// (compare/report/page/drawing/drawing.py) describe each kernel.
xlafuse.kernels = (() => {
  "use strict";
  const { breakable, count, make } = xlafuse;
  const { bandsOf, kindOf } = xlafuse.drawn;
  const MOST_LINES = 4;

  // Return the kernels of each implementation, in launch order.
  function kernelsOf(data) {
    const stages = (kernel) => bandsOf(kernel).map((band) => data.bands[band].label).join(", ");
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
      fold.table = () => table(implementation, kernels, { timed, priced });
      slot.append(fold);
    }
  }

  function open(fold) {
    if (!fold.querySelector("table")) fold.append(fold.table());
    fold.open = true;
  }

  function table(implementation, kernels, { timed, priced }) {
    const columns = [
      ["#", "num", (kernel, index) => index + 1],
      ["kernel", "", (kernel, index) => link(implementation, kernel, index)],
      ["kind", "", kind],
      ["stages", "", (kernel) => kernel.stages],
      ["source", "mono path", (kernel) => kernel.lines.slice(0, MOST_LINES).join(", ")],
      ["launches", "num", (kernel) => kernel.launches],
      ["reads", "num", (kernel) => kernel.read],
      ["writes", "num", (kernel) => kernel.written],
      ["FLOPs", "num", (kernel) => kernel.flops],
      ["µs", "num", (kernel) => kernel.time, timed || kernels.some((kernel) => kernel.time)],
      ["roofline µs", "num", (kernel) => kernel.roofline_time || "?", priced],
      ["recoverable µs", "num", (kernel) => (kernel.roofline_time ? kernel.recoverable : "?"), timed && priced],
      ["bound", "", (kernel) => kernel.bound, priced],
    ].filter(([, , , wanted = true]) => wanted);
    const rows = kernels.map((kernel, index) => columns.map(([, , content]) => content(kernel, index)));
    const node = xlafuse.table("plain", columns, rows);
    [...node.tBodies[0].rows].forEach((row, index) => Object.assign(row.dataset, { implementation, index }));
    const scroll = make("div", "scroll");
    scroll.append(node);
    return scroll;
  }

  function link(implementation, { name }, index) {
    const node = make("a", "kernel mono", undefined, { href: "#c-sources" });
    Object.assign(node.dataset, { kernel: index, implementation });
    return breakable(node, name);
  }

  function kind(kernel) {
    const node = document.createDocumentFragment();
    node.append(kernel.kind);
    if (kernel.phase === "backward") node.append(" ", make("span", "muted", kernel.phase));
    return node;
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
    return bars.flatMap(({ implementation, index, gap, took, helpers, predicted }) => {
      let end = 0;
      return index.map((own, i) => {
        const start = end + gap[i];
        end = start + took[i];
        return { implementation, index: own, start: start / 1e3, end: end / 1e3, took: `${predicted ? "~" : ""}${(took[i] / 1e3).toPrecision(4)} µs`,
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
