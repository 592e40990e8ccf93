// The kernels of a case as tables, and what the bars of its time axis say of them. What is known of each is in the data of
// the drawing (compare/report/page/drawing/drawing.py).
xlafuse.kernels = (() => {
  "use strict";
  const { make } = xlafuse;
  const { breakable, count, kindOf } = xlafuse.drawn;
  const MOST_LINES = 4;
  const tables = new WeakMap(); // an implementation's fold -> what fills it

  // By implementation, in launch order.
  function known(data) {
    const stages = ({ ops }) => Object.keys(ops).filter((band) => band !== "").map((band) => data.bands[band].label).join(", ");
    return new Map((data?.columns ?? []).map((column) => [column.name,
      column.kernels.map((kernel) => ({ ...kernel, stages: stages(kernel) }))]));
  }

  // A fold for each implementation that has kernels, which is filled when it is opened.
  function show(slot, data, { timed }) {
    slot.replaceChildren();
    for (const [implementation, kernels] of known(data)) {
      if (!kernels.length) continue;
      const fold = make("details", "kernels");
      fold.dataset.implementation = implementation;
      fold.append(make("summary", "", `${implementation}: ${count(kernels.length, "kernel")} as a table`));
      fold.addEventListener("toggle", () => fold.open && open(fold));
      tables.set(fold, () => table(implementation, kernels, timed));
      slot.append(fold);
    }
  }

  function open(fold) {
    const fill = tables.get(fold);
    if (fill) fold.append(fill());
    tables.delete(fold);
    fold.open = true;
  }

  function table(implementation, kernels, timed) {
    const heads = [["#", "num"], ["kernel"], ["kind"], ["stages"], ["source"], ["launches", "num"], ["reads", "num"], ["writes", "num"],
      ["FLOPs", "num"], ...(timed ? [["µs", "num"]] : []), ["least µs", "num"], ...(timed ? [["recoverable µs", "num"]] : []), ["bound"]];
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
      if (kernel.part === "backward") kind.append(" ", make("span", "muted", kernel.part));
      const number = (text) => make("td", "num", text);
      row.append(number(index + 1), name, kind, make("td", "", kernel.stages),
        make("td", "mono path", kernel.lines.slice(0, MOST_LINES).join(", ")), number(kernel.launches), number(kernel.read), number(kernel.written),
        number(kernel.flops), ...(timed ? [number(kernel.time)] : []), number(kernel.least || "?"),
        ...(timed ? [number(kernel.least ? kernel.recoverable : "?")] : []), make("td", "", kernel.bound));
    });
    const scroll = make("div", "scroll");
    scroll.append(node);
    return scroll;
  }

  // The row of a kernel, and its fold opened; undefined where there is none.
  function row(slot, { implementation, index }) {
    const fold = [...slot.children].find((each) => each.dataset.implementation === implementation);
    if (fold) open(fold);
    return fold?.querySelector(`tr[data-index="${index}"]`);
  }

  // What is drawn: bars (compare/report/page/kernels.py) with their times in µs, and what the tooltip says.
  function values(bars, data) {
    const kernels = known(data);
    return bars.flatMap(({ implementation, index, gap, took, helps }) => {
      let end = 0;
      return index.map((own, i) => {
        const start = end + gap[i];
        end = start + took[i];
        return { implementation, index: own, start: start / 1e3, end: end / 1e3, took: `${(took[i] / 1e3).toPrecision(4)} µs`,
          ...(own === null ? helper(helps[i]) : said(own, kernels.get(implementation)?.[own])) };
      });
    });
  }

  const helper = (name) => ({ kind: "other", kernel: `${name} (helps another kernel)`, stages: "", reads: "", writes: "", least: "", bound: "" });

  function said(index, kernel) {
    if (!kernel) return { ...helper(""), kernel: `${index + 1}.` }; // of a graph that is too large for a picture
    return { kind: kindOf(kernel), kernel: `${index + 1}. ${kernel.name}`, stages: kernel.stages, reads: kernel.read, writes: kernel.written,
      least: kernel.least ? `${kernel.least} µs` : "?", bound: kernel.bound };
  }

  return { show, open, row, values };
})();
