// Fusion graphs side by side: stages are bands, implementations columns, kernels boxes over the bands whose operations
// they hold, buffers between kernels edges as wide as their bytes. The browser's grid does the layout; edges are drawn
// over what it made. Text is a run's own and reaches the page through textContent alone.
window.xlafuse = window.xlafuse || {};
xlafuse.drawing = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const WIDEST = 13, THINNEST = 1.25; // pixels, of the case's largest buffer, and of what is nothing beside it
  const TELLING = 0.02; // of the largest buffer: smaller ones are drawn for the kernel chosen alone
  const MOST_BUFFERS = 12; // named of a kernel
  const KINDS = { gemm: "gemm", attention: "attention", reduction: "reduction", elementwise: "elementwise",
    copy: "copy", memset: "copy" };
  const states = new WeakMap();

  function make(tag, className, text, attributes = {}) {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  }

  function path(className, d, width) {
    const node = document.createElementNS(SVG, "path");
    node.setAttribute("class", className);
    node.setAttribute("d", d);
    node.style.strokeWidth = `${width}px`;
    return node;
  }

  function breakable(node, text) {
    // Compilers' names are long, and break best after an underscore or a dot.
    text.split(/(?<=[_./])(?=\w)/).forEach((piece, i) => node.append(...(i ? [document.createElement("wbr")] : []), piece));
    return node;
  }

  const count = (many, one) => `${many.toLocaleString("en")} ${one}${many === 1 ? "" : "s"}`;

  function show(element, data, options = {}) {
    let state = states.get(element);
    if (!state || state.given !== data) {
      const views = data.layouts.length ? data.layouts.map((layout) => resolved(data, layout)) : [data];
      state = { element, given: data, data: views[0], views, visible: new Set(data.shown), unfolded: new Set(), size: 12, pinned: null };
      states.set(element, state);
      state.options = options;
      frame(state);
    }
    state.options = { ...state.options, ...options };
    if (options.kernel) reveal(state, options.kernel);
  }

  // One layout of the data: bands that are drawn as one made one, buffers and reasons by name.
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
      const accesses = (list) => (list === null ? ["not known"]
        : [...list.slice(0, MOST_BUFFERS).map(buffer), ...(list.length > MOST_BUFFERS ? [`and ${list.length - MOST_BUFFERS} smaller ones`] : [])]);
      return { ...column, folds: layout.columns[c].folds,
        kernels: column.kernels.map((kernel, k) => ({ ...kernel, pieces: layout.columns[c].pieces[k], ops: together(kernel.ops),
          stages: kernel.ops, reads: accesses(kernel.reads), writes: accesses(kernel.writes) })),
        edges: column.edges.map((edge) => {
          const [text, bytes, role] = column.buffers[edge.buffer];
          return { ...edge, text, bytes, role, why: edge.why.map((place) => column.reasons[place]) };
        }) };
    });
    return { ...data, bands, columns, stages: data.bands };
  }

  // The frame around the picture: which columns, zoom, legend, table. Made once.

  function frame(state) {
    const { element, data } = state;
    element.replaceChildren();
    const root = make("div", "dr");
    if (data.columns.length) {
      const bar = make("div", "dr-bar");
      const columns = make("div", "dr-chips", undefined, { role: "group", "aria-label": "Implementations shown" });
      data.columns.forEach((column, c) => {
        const chip = make("button", "dr-chip", column.name, { type: "button" });
        chip.title = column.title;
        chip.style.setProperty("--dr-own", xlafuse.colour ? xlafuse.colour(column.name) : "currentColor");
        chip.setAttribute("aria-pressed", state.visible.has(c));
        chip.addEventListener("click", () => {
          state.visible.has(c) ? state.visible.delete(c) : state.visible.add(c);
          chip.setAttribute("aria-pressed", state.visible.has(c));
          draw(state);
        });
        columns.append(chip);
      });
      const zoom = make("div", "dr-zoom", undefined, { role: "group", "aria-label": "Size of the picture" });
      for (const [text, label, step] of [["−", "smaller", -1.5], ["+", "larger", 1.5], ["fit", "fit the width", 0]]) {
        const button = make("button", "dr-button", text, { type: "button", "aria-label": label, title: label });
        button.addEventListener("click", () => resize(state, step));
        zoom.append(button);
      }
      if (state.views.some((view) => view.columns.some((column) => column.folds.length))) {
        const all = make("button", "dr-button dr-all", "every kernel", { type: "button", "aria-pressed": "false" });
        all.title = "Kernels of little cost are folded in long columns";
        all.addEventListener("click", () => {
          state.every = toggled(all);
          draw(state);
        });
        zoom.append(all);
      }
      if (state.views.length > 1) {
        const all = make("button", "dr-button", "every stage", { type: "button", "aria-pressed": "false" });
        all.title = "Neighbouring stages of little cost are drawn as one";
        all.addEventListener("click", () => {
          state.data = state.views[toggled(all) ? 1 : 0];
          state.unfolded.clear();
          draw(state);
        });
        zoom.append(all);
      }
      bar.append(columns, zoom);
      state.scroll = make("div", "dr-scroll", undefined, { role: "group", "aria-label":
        "Fusion graphs: stages down, implementations across. Arrow keys move between kernels, Enter keeps one open." });
      state.grid = make("div", "dr-grid");
      state.scroll.append(state.grid);
      state.legend = make("p", "dr-legend");
      root.append(bar, state.scroll, state.legend, table(state));
      state.tip = make("div", "dr-tip", undefined, { role: "dialog", "aria-label": "Kernel" });
      state.tip.hidden = true;
      root.append(state.tip);
      state.scroll.addEventListener("keydown", (event) => move(state, event));
      root.addEventListener("keydown", (event) => event.key === "Escape" && close(state));
      root.addEventListener("pointerleave", () => state.pinned || hide(state));
      state.scroll.addEventListener("scroll", () => (state.pinned ? put(state) : hide(state)), { passive: true });
      outside(state, root);
      new ResizeObserver(() => edges(state)).observe(state.grid);
    }
    for (const { name, why } of data.unread) root.append(make("p", "dr-note", `${name}: not drawn: ${why}`));
    element.append(root);
    if (data.columns.length) draw(state);
  }

  function toggled(button) {
    const pressed = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", pressed);
    return pressed;
  }

  function outside(state, root) {
    // Of the whole page, for as long as the picture is in it.
    const ended = new AbortController();
    const listen = (type, act, options = {}) => document.addEventListener(type, (event) =>
      root.isConnected ? state.pinned && act(event) : ended.abort(), { ...options, signal: ended.signal });
    listen("scroll", () => (inView(state) ? put(state) : close(state)), { passive: true, capture: true });
    listen("pointerdown", ({ target }) => !state.tip.contains(target) && !target.closest?.(".dr-box") && close(state));
  }

  function inView({ near, scroll }) {
    const own = near.getBoundingClientRect(), frame = scroll.getBoundingClientRect();
    return own.bottom > Math.max(0, frame.top) && own.top < Math.min(document.documentElement.clientHeight, frame.bottom);
  }

  function resize(state, step) {
    if (step) state.size = Math.min(24, Math.max(6, state.size + step));
    else {
      const fixed = state.columns.reduce((sum, column) => sum + column.gutter, 0); // edges are as wide as their bytes
      const wanted = Math.max(100, state.scroll.clientWidth - fixed - 2);
      // Of the columns' own width: the grid stretches to fill what is there.
      const own = [...getComputedStyle(state.grid).gridTemplateColumns.matchAll(/[\d.]+/g)].reduce((sum, [width]) => sum + Number(width), 0);
      state.size = Math.min(16, Math.max(6, (state.size * wanted) / (own - fixed)));
    }
    draw(state);
  }

  // Rows: each band has as many slots as its fullest lane; boxes of emptier lanes share them evenly.

  function units(column, c, state) {
    const folded = new Map();
    const found = [];
    column.folds.forEach((fold, f) => {
      if (state.every || state.unfolded.has(`${c}.${f}`)) return;
      const first = column.kernels[fold.members[0]];
      found.push({ order: fold.members[0], fold, f, members: fold.members, part: first.part, piece: first.pieces[0], last: true });
      for (const member of fold.members) folded.set(member, f);
    });
    column.kernels.forEach((kernel, index) => {
      if (folded.has(index)) return;
      const pieces = kernel.pieces.length ? kernel.pieces : [undefined];
      pieces.forEach((piece, p) => found.push({ order: index, kernel, members: [index], part: kernel.part, piece,
        first: p === 0, last: p === pieces.length - 1 }));
    });
    return found.sort((a, b) => a.order - b.order);
  }

  function lanesOf(own) {
    const lanes = [];
    for (const unit of own) if (unit.piece) (lanes[unit.piece[0]] ||= []).push(unit);
    return lanes.map((lane) => lane || []);
  }

  const touches = (unit, band) => unit.piece[1] <= band && band <= unit.piece[2];

  function rows(state, columns) {
    const slots = state.data.bands.map((_, band) =>
      Math.max(1, ...columns.flatMap((column) => column.lanes.map((lane) => lane.filter((u) => touches(u, band)).length))));
    let row = 2;
    const starts = [], titles = [];
    state.data.bands.forEach((band, b) => {
      if (b === 0 || band.part !== state.data.bands[b - 1].part) titles.push([row++, band.part]);
      starts.push(row);
      row += slots[b];
    });
    const slot = (lane, unit, band, end) => {
      const own = lane.filter((u) => touches(u, band));
      return starts[band] + Math.floor(((own.indexOf(unit) + (end ? 1 : 0)) * slots[band]) / own.length);
    };
    for (const column of columns) for (const lane of column.lanes) for (const unit of lane) {
      unit.top = slot(lane, unit, unit.piece[1], false);
      unit.bottom = slot(lane, unit, unit.piece[2], true);
    }
    return { starts, slots, titles, end: row };
  }

  function draw(state) {
    const { data, grid } = state;
    const focused = grid.contains(document.activeElement) ? document.activeElement.dataset.key : null;
    close(state);
    grid.replaceChildren();
    grid.style.fontSize = `${state.size}px`;
    const columns = data.columns.map((column, c) => ({ ...column, c })).filter(({ c }) => state.visible.has(c));
    for (const column of columns) {
      column.units = units(column, column.c, state);
      column.lanes = lanesOf(column.units);
      if (!column.lanes.length) column.lanes.push([]);
    }
    state.columns = columns;
    state.boxes = new Map();
    const at = rows(state, columns);
    state.largest = Math.max(1, ...data.columns.flatMap((column) => column.edges.map((edge) => edge.bytes)),
      ...data.columns.flatMap((column) => column.kernels.flatMap((kernel) => [kernel.in, kernel.out])));
    tracks(state, columns);
    let template = "var(--dr-label)", line = 2;
    for (const column of columns) {
      column.line = line;
      const width = { 1: 15, 2: 11 }[column.lanes.length] || 9.5;
      template += ` ${column.lanes.map(() => `1.6em ${width}em`).join(" ")} ${column.gutter}px`;
      line += 2 * column.lanes.length + 1;
    }
    grid.style.gridTemplateColumns = template;
    const place = (node, top, bottom, left, right) => {
      node.style.gridArea = `${top} / ${left} / ${bottom} / ${right}`;
      grid.append(node);
      return node;
    };
    place(make("div", "dr-corner", data.inferred ? "operation (matched by kind and order)" : "stage"), 1, 2, 1, 2);
    for (const [row, part] of at.titles) {
      place(make("div", "dr-part"), row, row + 1, 1, line);
      place(make("div", "dr-part-name", part), row, row + 1, 1, 2);
    }
    data.bands.forEach((band, b) => {
      place(make("div", b % 2 ? "dr-band" : "dr-band dr-even"), at.starts[b], at.starts[b] + at.slots[b], 1, line);
      const label = make("div", "dr-stage", band.label, { title: (band.several || [band.label]).join("\n") });
      if (band.several) label.append(make("small", "", `${band.several.length} stages of little cost`));
      place(label, at.starts[b], at.starts[b] + at.slots[b], 1, 2);
    });
    state.svg = document.createElementNS(SVG, "svg");
    state.svg.setAttribute("class", "dr-edges");
    state.svg.setAttribute("aria-hidden", "true");
    grid.append(state.svg);
    for (const column of columns) {
      const right = column.line + 2 * column.lanes.length + 1;
      const head = place(make("div", "dr-head"), 1, 2, column.line, right);
      head.style.setProperty("--dr-own", xlafuse.colour ? xlafuse.colour(column.name) : "currentColor");
      head.append(make("strong", "", column.name, { title: column.name }), make("span", "", column.title));
      for (const unit of column.units) {
        if (!unit.piece) continue;
        const node = place(box(state, column, unit, at), unit.top, unit.bottom, column.line + 1 + 2 * unit.piece[0],
          column.line + 2 + 2 * (unit.piece[0] + spare(column, unit)));
        if (!unit.fold) node.style.gridTemplateRows = "subgrid"; // which would stretch it
      }
      for (const part of ["forward", "backward"]) {
        const free = column.units.filter((unit) => !unit.piece && unit.part === part);
        const own = data.bands.map((band, b) => (band.part === part ? b : -1)).filter((b) => b >= 0);
        if (!free.length || !own.length) continue;
        const last = own[own.length - 1];
        const stack = place(make("div", "dr-free"), at.starts[own[0]], at.starts[last] + at.slots[last], column.line + 1,
          right - 1);
        const alone = free.length === 1 && free[0].kernel;
        if (alone) stack.classList.add("dr-alone");
        stack.append(make("p", "", alone ? "names no stages: one kernel for all of them" : "names no stages: in the order of launch"));
        for (const unit of free) stack.append(box(state, column, unit, at));
      }
      if (column.note) place(make("div", "dr-free dr-words", column.note), 2, at.end, column.line + 1, right - 1);
    }
    edges(state);
    legend(state);
    const first = grid.querySelectorAll(".dr-box");
    const kept = focused && [...first].find((node) => node.dataset.key === focused);
    if (kept) kept.focus();
    for (const column of columns) {
      const nodes = [...first].filter((node) => Number(node.dataset.column) === column.c);
      if (nodes.length && !nodes.includes(kept)) nodes[0].tabIndex = 0;
    }
  }

  function spare(column, unit) {
    // Lanes to the right that nothing else uses in these bands.
    let more = 0;
    for (const lane of column.lanes.slice(unit.piece[0] + 1)) {
      if (lane.some((other) => other.piece[1] <= unit.piece[2] && unit.piece[1] <= other.piece[2])) break;
      more += 1;
    }
    return more;
  }

  function box(state, column, unit, at) {
    const { kernel, fold } = unit;
    const node = make("button", "dr-box", undefined, { type: "button", tabindex: "-1" });
    node.dataset.column = column.c;
    node.dataset.key = `${column.c}.${fold ? `f${unit.f}` : unit.order}`;
    if (unit.piece && unit.first !== false) unit.node = node;
    if (!unit.piece) unit.node = node;
    unit.own = node;
    const head = make("span", "dr-title");
    if (fold) {
      node.classList.add("dr-fold");
      head.append(make("b", "", `${fold.members.length} more`), make("small", "", fold.text));
      node.title = "Show these kernels";
      node.addEventListener("click", () => {
        state.unfolded.add(`${column.c}.${unit.f}`);
        draw(state);
        state.boxes.get(`${column.c}.${fold.members[0]}`)?.node.focus();
      });
    } else {
      node.style.setProperty("--dr-kind", `var(--kind-${KINDS[kernel.kind] || "other"})`);
      node.setAttribute("aria-label", [`${unit.order + 1}`, kernel.name, kernel.kind, kernel.time, kernel.bytes]
        .filter(Boolean).join(", "));
      const cost = [kernel.time, kernel.bytes].filter(Boolean).join(" · ");
      const name = make("b", "", undefined);
      name.append(make("i", "", unit.order + 1), " ");
      breakable(name, kernel.name);
      head.append(name);
      if (unit.first === false) {
        node.classList.add("dr-again");
        head.append(make("small", "", "the same kernel, further"));
      } else {
        head.append(make("small", "", cost));
        const bar = make("span", "dr-time");
        bar.style.width = `${100 * kernel.bar}%`;
        head.append(bar);
      }
      node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && !state.pinned && tip(state, column, unit));
      node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !state.pinned && hide(state));
      node.addEventListener("focus", () => !state.pinned && !state.quiet && node.matches(":focus-visible") && tip(state, column, unit));
      node.addEventListener("blur", () => state.pinned || hide(state));
      node.addEventListener("click", () => pin(state, column, unit));
    }
    node.append(head);
    if (kernel && unit.piece) {
      for (let band = unit.piece[1]; band <= unit.piece[2]; band++) {
        if (!kernel.ops[band]) {
          if (!(band in kernel.ops) && band > unit.piece[1] && band < unit.piece[2]) gap(node, unit, band, at);
          continue;
        }
        const words = breakable(make("span", "dr-ops"), kernel.ops[band]);
        if (band === unit.piece[1]) head.append(words);
        else within(words, unit, band, at, node);
      }
    } else if (kernel && !unit.piece && kernel.ops[""]) head.append(breakable(make("span", "dr-ops"), kernel.ops[""]));
    if (unit.piece) head.style.gridRow = `1 / ${Math.min(unit.bottom, at.starts[unit.piece[1]] + at.slots[unit.piece[1]]) - unit.top + 1}`;
    for (const member of unit.members) {
      const known = state.boxes.get(`${column.c}.${member}`);
      if (known) known.all.push(unit);
      else state.boxes.set(`${column.c}.${member}`, { node, unit, all: [unit] });
    }
    return node;
  }

  function within(child, unit, band, at, node) {
    const top = Math.max(unit.top, at.starts[band]), bottom = Math.min(unit.bottom, at.starts[band] + at.slots[band]);
    child.style.gridRow = `${top - unit.top + 1} / ${bottom - unit.top + 1}`;
    node.append(child);
  }

  function gap(node, unit, band, at) {
    within(make("span", "dr-gap", "", { title: "nothing of this stage" }), unit, band, at, node);
  }

  // Edges.

  const widthOf = (state, bytes) => Math.max(THINNEST, (WIDEST * bytes) / state.largest);

  function tracks(state, columns) {
    // Edges that cannot go straight down have tracks of their own to the right of their column, short ones innermost.
    for (const column of columns) {
      const unitOf = new Map();
      for (const unit of column.units) for (const member of unit.members) {
        const known = unitOf.get(member);
        unitOf.set(member, { head: known ? known.head : unit, tail: unit });
      }
      const flows = new Map();
      column.edges.forEach((edge) => {
        const from = unitOf.get(edge.from).tail, to = unitOf.get(edge.to).head;
        if (from === to) return;
        const key = `${column.units.indexOf(from)}>${column.units.indexOf(to)}>${edge.role === "saved"}`;
        const flow = flows.get(key);
        if (flow) { flow.edges.push(edge); flow.bytes += edge.bytes; }
        else flows.set(key, { from, to, edges: [edge], bytes: edge.bytes, column });
      });
      column.flows = [...flows.values()];
      const telling = column.flows.filter((flow) => flow.bytes >= TELLING * state.largest);
      column.minor = column.flows.length - telling.length;
      const free = column.units.filter((unit) => !unit.piece);
      const row = (unit, end) => (unit.piece ? (end ? unit.bottom : unit.top) : (unit.part === "backward" ? 1e5 : 0) + free.indexOf(unit));
      for (const flow of column.flows) {
        flow.minor = !telling.includes(flow);
        flow.direct = follows(column, flow.from, flow.to);
        flow.span = [Math.min(row(flow.from, true), row(flow.to)) - 0.4, Math.max(row(flow.from, true), row(flow.to)) + 0.4];
      }
      const taken = [];
      const routed = column.flows.filter((flow) => !flow.direct);
      for (const flow of routed.sort((a, b) => a.minor - b.minor || a.span[1] - a.span[0] - b.span[1] + b.span[0])) {
        const fits = (track) => track.minor === flow.minor && track.flows.every((o) => o.span[1] <= flow.span[0] || flow.span[1] <= o.span[0]);
        let track = taken.find(fits);
        if (!track) taken.push((track = { flows: [], width: 0, minor: flow.minor }));
        track.flows.push(flow);
        track.width = Math.max(track.width, widthOf(state, flow.bytes));
        flow.track = track;
      }
      let x = 9;
      for (const track of taken) {
        if (track.minor) { track.x = 7; continue; } // shown alone, so they may share one
        track.x = x + track.width / 2;
        x += track.width + 4;
      }
      column.gutter = Math.max(26, x + 10);
    }
  }

  function follows(column, from, to) {
    // Whether `to` is the next box below `from`: the edge is a straight one then.
    if (Boolean(from.piece) !== Boolean(to.piece) || (to.piece && to.piece[0] !== from.piece[0])) return false;
    const lane = from.piece ? [...column.lanes[from.piece[0]]].sort((a, b) => a.top - b.top)
      : column.units.filter((unit) => !unit.piece && unit.part === from.part);
    return lane.includes(to) && lane.indexOf(to) === lane.indexOf(from) + 1;
  }

  function edges(state) {
    const { svg, grid, columns } = state;
    if (!svg || !svg.isConnected || !grid.offsetWidth) return;
    // Everything is measured before anything is drawn: a line that is put in makes the browser lay out the grid again.
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
      const down = new Map(), ports = new Map();
      for (const flow of column.flows) if (flow.direct && !flow.minor) down.set(flow.from, [...(down.get(flow.from) || []), flow]);
      const used = new Map();
      const port = (unit, side, width) => {
        // Ports fill a side from its end inwards, so that edges leave low and arrive high.
        const key = side === "out" ? `o${column.units.indexOf(unit)}` : `i${column.units.indexOf(unit)}`;
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
          const x = outer + flow.track.x, y1 = port(flow.from, "out", width), y2 = port(flow.to, "in", width);
          const r = Math.min(7, Math.abs(y2 - y1) / 2), turn = y2 > y1 ? r : -r;
          d = `M ${a.right - 1} ${y1} H ${x - r} Q ${x} ${y1} ${x} ${y1 + turn} V ${y2 - turn} Q ${x} ${y2} ${x - r} ${y2} H ${b.right - 1}`;
        }
        const saved = flow.edges.some((edge) => edge.role === "saved");
        flow.lines = [path(`dr-edge${saved ? " dr-saved" : ""}${flow.minor ? " dr-minor" : ""}`, d, width)];
        // A residual is two lines, so that it is told by more than its colour.
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
    if (state.lit) light(state, state.lit);
  }

  function stubs(state, unit, rect) {
    // What a kernel reads of the program's inputs comes in at its left, what it writes of the outputs leaves below that.
    const box = rect(unit.own), { kernel } = unit, lines = [];
    if (kernel.in) {
      const width = widthOf(state, kernel.in), y = box.top + 5 + width / 2;
      lines.push(path("dr-stub dr-in", `M ${box.left - 15} ${y} H ${box.left}`, width));
    }
    if (kernel.out) {
      const width = widthOf(state, kernel.out), y = box.bottom - 5 - width / 2, half = width / 2 + 2.5;
      lines.push(path("dr-stub dr-out", `M ${box.left} ${y} H ${box.left - 10}`, width));
      lines.push(path("dr-arrow", `M ${box.left - 10} ${y - half} L ${box.left - 17} ${y} L ${box.left - 10} ${y + half} Z`, 0));
    }
    return lines;
  }

  // What is said of a kernel or a buffer.

  function light(state, what) {
    dim(state);
    state.lit = what;
    state.grid.classList.add("dr-lit");
    for (const column of state.columns) for (const flow of column.flows) {
      if (flow === what.flow || (what.unit && what.column === column && [flow.from, flow.to].some((u) => u.order === what.unit.order))) {
        for (const line of flow.lines || []) line.classList.add("dr-on");
        for (const unit of [flow.from, flow.to]) unit.own?.classList.add("dr-beside");
      }
    }
    if (what.unit) for (const unit of state.boxes.get(`${what.column.c}.${what.unit.order}`).all) unit.own.classList.add("dr-on");
  }

  function dim(state) {
    state.lit = null;
    state.grid.classList.remove("dr-lit");
    for (const node of state.grid.querySelectorAll(".dr-on, .dr-beside")) node.classList.remove("dr-on", "dr-beside");
  }

  function hide(state) {
    if (state.tip) state.tip.hidden = true;
    if (state.grid) dim(state);
  }

  function close(state) {
    const back = state.pinned && state.tip.contains(document.activeElement) ? state.pinned : null;
    state.pinned = null;
    state.quiet = true; // focus that comes back is no wish to read the same again
    back?.focus();
    state.quiet = false;
    hide(state);
  }

  function line(list, name, value) {
    if (value) list.append(make("dt", "", name), make("dd", "", value));
  }

  function tip(state, column, unit) {
    const { kernel } = unit;
    const body = document.createDocumentFragment();
    body.append(make("p", "dr-tip-name", `${unit.order + 1}. ${kernel.name}`));
    const list = make("dl");
    const times = kernel.launches === "1" ? "" : `, ${kernel.launches} launches`;
    line(list, "kind", `${kernel.kind}, ${kernel.part}${times}`);
    line(list, "time", kernel.time ? kernel.time + (kernel.time_share ? `, ${kernel.time_share} of ${column.name}'s` : "") : "not measured");
    line(list, "at least", kernel.floor && `${kernel.floor}-bound`);
    line(list, "bytes", kernel.bytes + (kernel.bytes_share ? `, ${kernel.bytes_share} of ${column.name}'s` : ""));
    const holds = Object.entries(kernel.stages).filter(([, words]) => words);
    line(list, "computes", holds.map(([band, words]) => (band === "" ? (holds.length > 1 ? `besides: ${words}` : words) : `${state.data.stages[band].label}: ${words}`)).join("\n"));
    line(list, "reads", `${kernel.read}: ${kernel.reads.join("; ")}`);
    line(list, "writes", `${kernel.written}: ${kernel.writes.join("; ")}`);
    line(list, "FLOPs", kernel.flops === "?" ? "not known" : kernel.flops);
    for (const [name, value] of Object.entries(kernel.facts)) line(list, name, value);
    if (kernel.lines.length) {
      const places = make("dd");
      for (const place of kernel.lines.slice(0, 8)) places.append(source(state, column, unit, place, place));
      if (kernel.lines.length > 8) places.append(`and ${kernel.lines.length - 8} more`);
      list.append(make("dt", "", "lines"), places);
    }
    body.append(list);
    const actions = make("p", "dr-actions");
    actions.append(source(state, column, unit, undefined, "its source →"));
    if (!state.pinned) actions.append(make("span", "", "click or Enter keeps this open"));
    body.append(actions);
    state.tip.replaceChildren(body);
    state.near = unit.own;
    put(state);
    light(state, { column, unit });
  }

  function source(state, column, unit, place, text) {
    const button = make("button", "dr-link", text, { type: "button" });
    button.addEventListener("click", () => {
      close(state);
      state.options.onKernel?.({ implementation: column.name, index: unit.order, ...(place ? { line: place } : {}) });
    });
    return button;
  }

  function tipOfEdge(state, flow, near) {
    const body = document.createDocumentFragment();
    const name = (unit) => (unit.fold ? `${unit.fold.members.length} folded kernels` : `${unit.order + 1}. ${unit.kernel.name}`);
    body.append(make("p", "dr-tip-name", flow.edges.length === 1 ? flow.edges[0].text : count(flow.edges.length, "buffer")));
    if (flow.edges.length > 1) body.append(make("p", "", flow.edges.slice(0, 6).map((edge) => edge.text).join("; ")));
    const list = make("dl");
    line(list, "written by", name(flow.from));
    line(list, "read by", name(flow.to));
    if (flow.edges.some((edge) => edge.role !== "intermediate")) line(list, "role", [...new Set(flow.edges.map((edge) => edge.role))].join(", "));
    const why = [...new Set(flow.edges.flatMap((edge) => edge.why))].slice(0, 3);
    line(list, "not fused", why.join("\n"));
    body.append(list);
    state.tip.replaceChildren(body);
    state.near = near;
    put(state);
    light(state, { flow });
  }

  function put(state) {
    // Beside what it is about, where there is room.
    const { tip: node } = state;
    node.hidden = false;
    const near = state.near.getBoundingClientRect(), own = node.getBoundingClientRect();
    const width = document.documentElement.clientWidth, height = document.documentElement.clientHeight;
    let left = near.right + 10;
    if (left + own.width > width - 8) left = near.left - own.width - 10;
    if (left < 8) left = Math.max(8, Math.min(near.left, width - own.width - 8));
    const beside = left >= near.right || left + own.width <= near.left;
    const top = beside ? near.top : near.bottom + 8;
    node.style.left = `${left}px`;
    node.style.top = `${Math.max(8, Math.min(top, height - own.height - 8))}px`;
  }

  function pin(state, column, unit) {
    if (state.pinned === unit.own) return close(state);
    state.pinned = unit.own;
    tip(state, column, unit);
    state.tip.querySelector(".dr-actions button").focus({ preventScroll: true });
  }

  function reveal(state, { implementation, index }) {
    const c = state.data.columns.findIndex((column) => column.name === implementation);
    if (c < 0 || !state.data.columns[c].kernels[index]) return;
    const fold = state.data.columns[c].folds.findIndex(({ members }) => members.includes(index));
    const hidden = !state.visible.has(c) || (fold >= 0 && !state.every && !state.unfolded.has(`${c}.${fold}`));
    state.visible.add(c);
    if (fold >= 0) state.unfolded.add(`${c}.${fold}`);
    state.element.querySelectorAll(".dr-chip")[c]?.setAttribute("aria-pressed", "true");
    if (hidden) draw(state);
    const { node, unit } = state.boxes.get(`${c}.${index}`);
    node.scrollIntoView({ block: "nearest", inline: "nearest" });
    light(state, { column: state.columns.find((column) => column.c === c), unit });
  }

  function move(state, event) {
    const node = event.target.closest(".dr-box");
    const [dx, dy] = { ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0] }[event.key] || [];
    if (!node || dx === undefined || state.pinned) return;
    event.preventDefault();
    const own = node.getBoundingClientRect();
    const column = state.columns.findIndex(({ c }) => c === Number(node.dataset.column));
    const wanted = state.columns[column + dx];
    const among = wanted ? [...state.grid.querySelectorAll(".dr-box")].filter((o) => Number(o.dataset.column) === wanted.c) : [];
    const next = dy ? among[among.indexOf(node) + dy]
      : among.sort((a, b) => Math.abs(a.getBoundingClientRect().top - own.top) - Math.abs(b.getBoundingClientRect().top - own.top))[0];
    if (!next) return;
    for (const other of among) other.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  // Words for the picture.

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
    const kinds = new Set(columns.flatMap((column) => column.kernels.map((kernel) => KINDS[kernel.kind] || "other")));
    for (const kind of kinds) swatch("dr-fill", kind, { background: `var(--kind-${kind})` });
    swatch("dr-flow", "between kernels, through memory, as wide as its bytes");
    if (columns.some((column) => column.edges.some((edge) => edge.role === "saved"))) swatch("dr-flow dr-dash", "saved for backward");
    swatch("dr-flow dr-grey", "the block's own inputs (in at the left) and outputs (arrow)");
    if (columns.some((column) => column.kernels.some((kernel) => kernel.bar))) swatch("dr-fill dr-thin", "time, of the longest kernel here");
    const minor = columns.reduce((sum, column) => sum + column.minor, 0);
    if (minor) node.append(make("span", "dr-key", `${count(minor, "buffer")} under 2% of the largest: drawn with the kernel chosen`));
  }

  function table(state) {
    const details = make("details", "dr-table");
    details.append(make("summary", "", "The picture as tables"));
    details.addEventListener("toggle", () => {
      if (!details.open || details.children.length > 1) return;
      const data = state.views.at(-1); // every stage apart
      const stages = grid(["stage", ...data.columns.map((column) => column.name)], data.bands.map((band, b) => [
        band.part === "backward" ? `backward: ${band.label}` : band.label,
        ...data.columns.map((column) => column.cells[b])]), "Stages and the kernels that hold them; words compare with the first column that holds the stage");
      const kernels = grid(["implementation", "#", "kernel", "part", "kind", "time", "read", "written", "FLOPs", "lines"],
        data.columns.flatMap((column) => column.kernels.map((k, index) => [column.name, index + 1, k.name, k.part, k.kind,
          k.time || "not measured", k.read, k.written, k.flops, k.lines.join(", ")])), "Kernels in the order of launch");
      const buffers = grid(["implementation", "buffer", "role", "from", "to"], data.columns.flatMap((column) =>
        column.edges.map((edge) => [column.name, edge.text, edge.role, edge.from + 1, edge.to + 1])),
        "Buffers that one kernel writes and another reads");
      for (const each of [stages, kernels, buffers]) details.append(each);
    });
    return details;
  }

  function grid(heads, lines, caption) {
    const scroll = make("div", "dr-tablescroll", undefined, { tabindex: "0", role: "region", "aria-label": caption });
    const node = make("table");
    node.append(make("caption", "", caption));
    const head = node.createTHead().insertRow();
    for (const text of heads) head.append(make("th", "", text, { scope: "col" }));
    const body = node.createTBody();
    for (const texts of lines) {
      const row = body.insertRow();
      for (const text of texts) row.append(make("td", "", text));
    }
    scroll.append(node);
    return scroll;
  }

  return { show };
})();
