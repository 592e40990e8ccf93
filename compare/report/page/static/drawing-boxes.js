// The boxes of kernels, the lines of the buffers between them, and the tip of what is under the pointer, focused or chosen.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const { breakable, button, count, make } = xlafuse;
  const { kindOf, widthOf } = xlafuse.drawn;
  const SVG = "http://www.w3.org/2000/svg";

  function path(className, d, width) {
    const node = document.createElementNS(SVG, "path");
    node.setAttribute("class", className);
    node.setAttribute("d", d);
    node.style.strokeWidth = `${width}px`;
    return node;
  }

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
    const times = (kernel.launches === "1" ? "" : `, ${kernel.launches} launches`)
      + (kernel.times > 1 ? `; one of ${kernel.times} that do the same work` : "");
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

  function box(state, column, unit, at) {
    const { kernel, fold } = unit;
    const node = button("dr-box", undefined, () => (fold ? unfold(state, column, unit) : pin(state, column, unit)), { tabindex: "-1" });
    node.dataset.column = column.c;
    node.dataset.key = `${column.c}.${fold ? `f${unit.f}` : unit.order}`;
    unit.own = node;
    const head = make("span", "dr-title");
    if (fold) {
      node.classList.add("dr-fold");
      head.append(make("b", "", `${fold.members.length} more`), make("small", "", fold.text));
      node.title = "Show these kernels";
    } else {
      node.style.setProperty("--dr-kind", `var(--kind-${kindOf(kernel)})`);
      node.setAttribute("aria-label", [`${unit.order + 1}`, kernel.name, kernel.kind, kernel.time, kernel.bytes]
        .filter(Boolean).join(", "));
      const cost = [kernel.time, kernel.bytes, kernel.times > 1 && `one of ${kernel.times} alike`].filter(Boolean).join(" · ");
      const name = make("b");
      name.append(make("i", "", unit.order + 1), " ");
      breakable(name, kernel.name);
      head.append(name);
      if (unit.first === false) {
        node.classList.add("dr-again");
        head.append(make("small", "", "same kernel, continued"));
      } else {
        head.append(make("small", "", cost));
        const bar = make("span", "dr-time");
        bar.style.width = `${(100 * (kernel.us || 0)) / state.longest}%`;
        head.append(bar);
      }
      node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && !state.pinned && tip(state, column, unit));
      node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !state.pinned && hide(state));
      node.addEventListener("focus", () => !state.pinned && !state.quiet && node.matches(":focus-visible") && tip(state, column, unit));
      node.addEventListener("blur", () => state.pinned || hide(state));
    }
    node.append(head);
    if (kernel && unit.piece) {
      for (let band = unit.piece[1]; band <= unit.piece[2]; band++) {
        const words = kernel.ops[band] && breakable(make("span", "dr-ops"), kernel.ops[band]);
        const gap = !(band in kernel.ops) && band > unit.piece[1] && band < unit.piece[2];
        if (gap) within(make("span", "dr-gap", "", { title: "the kernel computes nothing of this stage" }), unit, band, at, node);
        else if (words && band === unit.piece[1]) head.append(words);
        else if (words) within(words, unit, band, at, node);
      }
    } else if (kernel?.ops[""]) head.append(breakable(make("span", "dr-ops"), kernel.ops[""]));
    if (unit.piece) head.style.gridRow = `1 / ${Math.min(unit.bottom, at.starts[unit.piece[1]] + at.slots[unit.piece[1]]) - unit.top + 1}`;
    for (const member of unit.members) {
      const known = state.boxes.get(`${column.c}.${member}`);
      if (known) known.all.push(unit);
      else state.boxes.set(`${column.c}.${member}`, { node, unit, all: [unit] });
    }
    return node;
  }

  function unfold(state, column, { fold, f }) {
    state.unfolded.add(`${column.c}.${f}`);
    state.redraw();
    state.boxes.get(`${column.c}.${fold.members[0]}`)?.node.focus();
  }

  function within(child, unit, band, at, node) {
    const top = Math.max(unit.top, at.starts[band]), bottom = Math.min(unit.bottom, at.starts[band] + at.slots[band]);
    child.style.gridRow = `${top - unit.top + 1} / ${bottom - unit.top + 1}`;
    node.append(child);
  }

  function edges(state) {
    const { svg, grid, columns } = state;
    if (!svg || !svg.isConnected || !grid.offsetWidth) return;
    // Measure everything before drawing: each added line would make the browser lay out the grid again.
    const origin = grid.getBoundingClientRect(), measured = new Map();
    for (const column of columns) for (const { own } of column.units) {
      const { top, left, right, bottom } = own.getBoundingClientRect();
      measured.set(own, { top: top - origin.top, left: left - origin.left, right: right - origin.left, bottom: bottom - origin.top });
    }
    const rect = (node) => measured.get(node);
    svg.style.width = `${grid.scrollWidth}px`;
    svg.style.height = `${grid.scrollHeight}px`;
    const lines = [];
    for (const column of columns) {
      const outer = Math.max(0, ...column.units.map((unit) => rect(unit.own).right));
      for (const unit of column.units) if (unit.kernel && unit.first !== false) lines.push(...stubs(state, unit, rect));
      const down = Map.groupBy(column.flows.filter((flow) => flow.direct && !flow.minor), (flow) => flow.from);
      const used = new Map();
      const port = (unit, side, width) => {
        // Ports fill a side from its end inwards: edges leave a box at its bottom and arrive at the top of the next.
        const key = `${side}${column.units.indexOf(unit)}`;
        const offset = used.get(key) || 6;
        used.set(key, offset + width + 2);
        const box = rect(unit.own);
        const room = Math.max(4, (box.bottom - box.top) / 2 - 4);
        return side === "out" ? box.bottom - Math.min(room, offset + width / 2) : box.top + Math.min(room, offset + width / 2);
      };
      const ordered = [...column.flows].sort((a, b) => b.bytes - a.bytes);
      for (const flow of ordered) {
        const width = widthOf(state, flow.bytes);
        let d;
        if (flow.direct) {
          const a = rect(flow.from.own), b = rect(flow.to.own);
          const all = down.get(flow.from) || [flow];
          const room = Math.min(a.right, b.right) - Math.max(a.left, b.left);
          const index = Math.max(0, all.indexOf(flow));
          const x = Math.max(a.left, b.left) + (room * (index + 1)) / (all.length + 1);
          d = `M ${x} ${a.bottom - 1} V ${b.top + 1}`;
        } else {
          const a = rect(flow.from.own), b = rect(flow.to.own);
          const x = outer + flow.channel.x, y1 = port(flow.from, "out", width), y2 = port(flow.to, "in", width);
          const r = Math.min(7, Math.abs(y2 - y1) / 2), turn = y2 > y1 ? r : -r;
          d = `M ${a.right - 1} ${y1} H ${x - r} Q ${x} ${y1} ${x} ${y1 + turn} V ${y2 - turn} Q ${x} ${y2} ${x - r} ${y2} H ${b.right - 1}`;
        }
        const saved = flow.edges.some((edge) => edge.role === "saved");
        flow.lines = [path(`dr-edge${saved ? " dr-saved" : ""}${flow.minor ? " dr-minor" : ""}`, d, width)];
        // A saved buffer is a double line, so that it differs by more than colour.
        if (saved) flow.lines.push(path(`dr-core${flow.minor ? " dr-minor" : ""}`, d, width * 0.4));
        lines.push(...flow.lines);
        if (flow.minor) continue;
        const hit = path("dr-hit", d, Math.max(10, width));
        hit.addEventListener("pointerenter", () => state.pinned || tipOfEdge(state, flow, hit));
        hit.addEventListener("pointerleave", () => state.pinned || hide(state));
        hit.addEventListener("click", () => tipOfEdge(state, flow, hit));
        lines.push(hit);
      }
    }
    svg.replaceChildren(...lines);
    if (state.highlighted) highlight(state, state.highlighted);
  }

  function stubs(state, unit, rect) {
    // The program's inputs enter a box at the upper left; its outputs leave at the lower left.
    const box = rect(unit.own), { kernel } = unit, lines = [];
    if (kernel.in) {
      const width = widthOf(state, kernel.in), y = box.top + 5 + width / 2;
      lines.push(path("dr-stub", `M ${box.left - 15} ${y} H ${box.left}`, width));
    }
    if (kernel.out) {
      const width = widthOf(state, kernel.out), y = box.bottom - 5 - width / 2, half = width / 2 + 2.5;
      lines.push(path("dr-stub", `M ${box.left} ${y} H ${box.left - 10}`, width));
      lines.push(path("dr-arrow", `M ${box.left - 10} ${y - half} L ${box.left - 17} ${y} L ${box.left - 10} ${y + half} Z`, 0));
    }
    return lines;
  }

  return { SVG, inView, highlight, hide, close, placeTip, box, edges };
})());
