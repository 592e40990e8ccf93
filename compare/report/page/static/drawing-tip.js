// The tip of a kernel or buffer under the pointer, focused or chosen, and the highlighting of its box and edges.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const { button, count, make } = xlafuse;

  function inView({ near, scroll }) {
    const own = near.getBoundingClientRect(), frame = scroll.getBoundingClientRect();
    return own.bottom > Math.max(0, frame.top) && own.top < Math.min(document.documentElement.clientHeight, frame.bottom);
  }

  function highlight(state, what) {
    clearHighlight(state);
    state.highlighted = what;
    state.grid.classList.add("dr-lit");
    for (const column of state.columns) for (const flow of column.flows) {
      if (flow === what.flow || (what.unit && what.column === column && [flow.from, flow.to].some((u) => u.order === what.unit.order))) {
        for (const line of flow.lines || []) line.classList.add("dr-on");
        for (const unit of [flow.from, flow.to]) unit.own?.classList.add("dr-neighbour");
      }
    }
    if (what.unit) for (const unit of state.boxes.get(`${what.column.c}.${what.unit.order}`).all) unit.own.classList.add("dr-on");
  }

  function clearHighlight(state) {
    state.highlighted = null;
    state.grid.classList.remove("dr-lit");
    for (const node of state.grid.querySelectorAll(".dr-on, .dr-neighbour")) node.classList.remove("dr-on", "dr-neighbour");
  }

  function hide(state) {
    if (state.tip) state.tip.hidden = true;
    if (state.grid) clearHighlight(state);
  }

  function close(state) {
    const back = state.pinned && state.tip.contains(document.activeElement) ? state.pinned : null;
    state.pinned = null;
    state.quiet = true; // returning focus must not open the tip again
    back?.focus();
    state.quiet = false;
    hide(state);
  }

  function line(list, name, value) {
    if (value) list.append(make("dt", "", name), make("dd", "", value));
  }

  function tip(state, column, unit) {
    const { kernel } = unit;
    const list = make("dl");
    const times = kernel.launches === "1" ? "" : `, ${kernel.launches} launches`;
    const kind = kernel.work === kernel.kind ? kernel.kind : `${kernel.kind}, ${kernel.work}`;
    line(list, "kind", `${kind}, ${kernel.phase}${times}`);
    line(list, "time", kernel.time ? kernel.time + (kernel.time_share ? `, ${kernel.time_share} of ${column.name}'s` : "") : "not measured");
    line(list, "roofline time", kernel.roofline_time && `${kernel.roofline_time} µs, ${kernel.bound}-bound`);
    line(list, "bytes", kernel.bytes + (kernel.bytes_share ? `, ${kernel.bytes_share} of ${column.name}'s` : ""));
    const holds = Object.entries(kernel.stages).filter(([, words]) => words);
    line(list, "computes", holds.map(([band, words]) => (band === "" ? (holds.length > 1 ? `other: ${words}` : words) : `${state.data.stages[band].label}: ${words}`)).join("\n"));
    line(list, "reads", `${kernel.read}: ${kernel.reads.join("; ")}`);
    line(list, "writes", `${kernel.written}: ${kernel.writes.join("; ")}`);
    line(list, "FLOPs", kernel.flops === "?" ? "unknown" : kernel.flops);
    for (const [name, value] of Object.entries(kernel.facts)) line(list, name, value);
    if (kernel.lines.length) {
      const places = make("dd");
      for (const place of kernel.lines.slice(0, 8)) places.append(source(state, column, unit, place, place));
      if (kernel.lines.length > 8) places.append(`and ${kernel.lines.length - 8} more`);
      list.append(make("dt", "", "lines"), places);
    }
    const actions = make("p", "dr-actions");
    actions.append(source(state, column, unit, undefined, "its source →"));
    if (!state.pinned) actions.append(make("span", "", "click or Enter keeps this open"));
    open(state, unit.own, { column, unit }, `${unit.order + 1}. ${kernel.name}`, list, actions);
  }

  function source(state, column, unit, place, text) {
    return button("dr-link", text, () => {
      close(state);
      state.options.onKernel?.({ implementation: column.name, index: unit.order, ...(place ? { line: place } : {}) });
    });
  }

  // Show a tip next to an element. what: to highlight.
  function open(state, near, what, title, ...content) {
    state.tip.replaceChildren(make("p", "dr-tip-name", title), ...content);
    state.near = near;
    placeTip(state);
    highlight(state, what);
  }

  function tipOfEdge(state, flow, near) {
    const texts = flow.edges.map((edge) => edge.text), several = texts.length > 1;
    const name = (unit) => (unit.fold ? `${unit.fold.members.length} folded kernels` : `${unit.order + 1}. ${unit.kernel.name}`);
    const list = make("dl");
    line(list, "written by", name(flow.from));
    line(list, "read by", name(flow.to));
    if (flow.edges.some((edge) => edge.role !== "intermediate")) line(list, "role", [...new Set(flow.edges.map((edge) => edge.role))].join(", "));
    const why = [...new Set(flow.edges.flatMap((edge) => edge.why))].slice(0, 3);
    line(list, "not fused", why.join("\n"));
    open(state, near, { flow }, several ? count(texts.length, "buffer") : texts[0],
      ...(several ? [make("p", "", texts.slice(0, 6).join("; "))] : []), list);
  }

  function placeTip(state) {
    // Place the tip next to its subject if there is space.
    const { tip: node } = state;
    node.hidden = false;
    const near = state.near.getBoundingClientRect(), own = node.getBoundingClientRect();
    const width = document.documentElement.clientWidth, height = document.documentElement.clientHeight;
    let left = near.right + 10;
    if (left + own.width > width - 8) left = near.left - own.width - 10;
    if (left < 8) left = Math.max(8, Math.min(near.left, width - own.width - 8));
    const nextTo = left >= near.right || left + own.width <= near.left;
    const top = nextTo ? near.top : near.bottom + 8;
    node.style.left = `${left}px`;
    node.style.top = `${Math.max(8, Math.min(top, height - own.height - 8))}px`;
  }

  function pin(state, column, unit) {
    if (state.pinned === unit.own) return close(state);
    state.pinned = unit.own;
    tip(state, column, unit);
    state.tip.querySelector(".dr-actions button").focus({ preventScroll: true });
  }

  return { inView, highlight, hide, close, tip, tipOfEdge, placeTip, pin };
})());
