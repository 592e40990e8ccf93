// Fusion graphs side by side. Stages are bands, implementations are columns, and a kernel is a box over the bands whose
// operations it computes. Edges are buffers between kernels, as wide as their bytes. CSS grid does the layout.
xlafuse.drawing = (() => {
  "use strict";
  const { button, count, make } = xlafuse;
  const { SVG, kindOf, columnsOf, layouts, units, tracksOf, rows, freeTracks, routeEdges, inView, highlight, hide, close, placeTip,
    box, edges } = xlafuse.drawn;
  const states = new WeakMap();

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
    const node = xlafuse.table("plain", heads.map((text) => [text]), lines);
    node.prepend(make("caption", "", caption));
    scroll.append(node);
    return scroll;
  }

  function show(element, given, options = {}) {
    let state = states.get(element);
    if (!state || state.given !== given) {
      const columns = columnsOf(given), views = layouts(given, columns);
      const kernels = columns.flatMap((column) => column.kernels), buffers = columns.flatMap((column) => column.edges);
      state = { element, given, data: views[0], views, redraw: () => draw(state), visible: new Set(given.shown), unfolded: new Set(),
        size: 12, pinned: null, longest: Math.max(...kernels.map(({ us }) => us)) || 1,
        largest: Math.max(1, ...buffers.map(({ bytes }) => bytes), ...kernels.flatMap((kernel) => [kernel.in, kernel.out])) };
      states.set(element, state);
      frame(state);
    }
    state.options = { ...state.options, ...options };
    if (options.kernel) reveal(state, options.kernel, options.focus);
  }

  // Make the frame around the drawing once: choice of columns, zoom, legend, table.

  function frame(state) {
    const { element, data } = state;
    const root = make("div", "dr");
    element.replaceChildren(root);
    if (data.columns.length) {
      const bar = make("div", "dr-bar");
      bar.append(chips(state), zoom(state));
      state.scroll = make("div", "dr-scroll", undefined, { role: "group", "aria-label":
        "Fusion graphs: stages down, implementations across. Arrow keys move between kernels, Enter keeps one open." });
      state.grid = make("div", "dr-grid");
      state.scroll.append(state.grid);
      state.legend = make("p", "dr-legend");
      state.tip = make("div", "dr-tip", undefined, { role: "dialog", "aria-label": "Kernel" });
      state.tip.hidden = true;
      root.append(bar, state.scroll, state.legend, table(state), state.tip);
      state.scroll.addEventListener("keydown", (event) => move(state, event));
      root.addEventListener("keydown", (event) => event.key === "Escape" && close(state));
      root.addEventListener("pointerleave", () => state.pinned || hide(state));
      state.scroll.addEventListener("scroll", () => (state.pinned ? placeTip(state) : hide(state)), { passive: true });
      outside(state, root);
      new ResizeObserver(() => edges(state)).observe(state.grid);
    }
    for (const { name, why } of data.unread) root.append(make("p", "dr-note", `${name} is not drawn: ${why}`));
    if (data.columns.length) draw(state);
  }

  function chips(state) {
    const group = make("div", "dr-chips", undefined, { role: "group", "aria-label": "Implementations shown" });
    state.data.columns.forEach((column, c) => {
      const show = (on) => (on ? state.visible.add(c) : state.visible.delete(c));
      const chip = toggle(state, "dr-chip", column.name, column.title, state.visible.has(c), show);
      chip.style.setProperty("--dr-own", xlafuse.colour(column.name));
      group.append(chip);
    });
    return group;
  }

  function zoom(state) {
    const group = make("div", "dr-zoom", undefined, { role: "group", "aria-label": "Size of the drawing" });
    for (const [text, label, step] of [["−", "smaller", -1.5], ["+", "larger", 1.5], ["fit", "fit the width", 0]]) {
      group.append(button("dr-button", text, () => resize(state, step), { "aria-label": label, title: label }));
    }
    if (state.views.some((view) => view.columns.some((column) => column.folds.length))) {
      const title = "Show all kernels; long columns fold kernels of little cost";
      group.append(toggle(state, "dr-button", "every kernel", title, false, (on) => { state.every = on; }));
    }
    if (state.views.length > 1) {
      const title = "Show all stages; neighbouring stages of little cost are drawn as one";
      group.append(toggle(state, "dr-button", "every stage", title, false, (on) => {
        state.data = state.views[on ? 1 : 0];
        state.unfolded.clear();
      }));
    }
    return group;
  }

  // Return a button that stays pressed. change: called with whether it is pressed, before the drawing is drawn again.
  function toggle(state, className, text, title, pressed, change) {
    return button(className, text, ({ currentTarget: node }) => {
      const on = node.getAttribute("aria-pressed") !== "true";
      node.setAttribute("aria-pressed", on);
      change(on);
      draw(state);
    }, { title, "aria-pressed": pressed });
  }

  function outside(state, root) {
    // Listen on the whole page while the drawing is in it.
    const ended = new AbortController();
    const listen = (type, act, options = {}) => document.addEventListener(type, (event) =>
      root.isConnected ? state.pinned && act(event) : ended.abort(), { ...options, signal: ended.signal });
    listen("scroll", () => (inView(state) ? placeTip(state) : close(state)), { passive: true, capture: true });
    listen("pointerdown", ({ target }) => !state.tip.contains(target) && !target.closest?.(".dr-box") && close(state));
  }

  function resize(state, step) {
    if (step) state.size = Math.min(24, Math.max(6, state.size + step));
    else {
      const fixed = state.columns.reduce((sum, column) => sum + column.gutter, 0); // edge widths are fixed
      const wanted = Math.max(100, state.scroll.clientWidth - fixed - 2);
      // Measure the columns themselves: the grid stretches to fill the page.
      const own = [...getComputedStyle(state.grid).gridTemplateColumns.matchAll(/[\d.]+/g)].reduce((sum, [width]) => sum + Number(width), 0);
      state.size = Math.min(16, Math.max(6, (state.size * wanted) / (own - fixed)));
    }
    draw(state);
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
      column.tracks = tracksOf(column.units);
      if (!column.tracks.length) column.tracks.push([]);
    }
    state.columns = columns;
    state.boxes = new Map();
    const at = rows(state, columns);
    routeEdges(state, columns);
    let template = "var(--dr-label)", line = 2;
    for (const column of columns) {
      column.line = line;
      const width = { 1: 15, 2: 11 }[column.tracks.length] || 9.5;
      template += ` ${column.tracks.map(() => `1.6em ${width}em`).join(" ")} ${column.gutter}px`;
      line += 2 * column.tracks.length + 1;
    }
    grid.style.gridTemplateColumns = template;
    const place = (node, top, bottom, left, right) => {
      node.style.gridArea = `${top} / ${left} / ${bottom} / ${right}`;
      grid.append(node);
      return node;
    };
    place(make("div", "dr-corner", data.inferred ? "operation (matched by kind and order)" : "stage"), 1, 2, 1, 2);
    for (const [row, phase] of at.titles) {
      place(make("div", "dr-phase"), row, row + 1, 1, line);
      place(make("div", "dr-phase-name", phase), row, row + 1, 1, 2);
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
      const right = column.line + 2 * column.tracks.length + 1;
      const head = place(make("div", "dr-head"), 1, 2, column.line, right);
      head.style.setProperty("--dr-own", xlafuse.colour(column.name));
      head.append(make("strong", "", column.name, { title: column.name }), make("span", "", column.title));
      for (const unit of column.units) {
        if (!unit.piece) continue;
        const node = place(box(state, column, unit, at), unit.top, unit.bottom, column.line + 1 + 2 * unit.piece[0],
          column.line + 2 + 2 * (unit.piece[0] + freeTracks(column, unit)));
        if (!unit.fold) node.style.gridTemplateRows = "subgrid"; // a subgrid would stretch a fold
      }
      for (const phase of ["forward", "backward"]) {
        const free = column.units.filter((unit) => !unit.piece && unit.phase === phase);
        const own = data.bands.map((band, b) => (band.phase === phase ? b : -1)).filter((b) => b >= 0);
        if (!free.length || !own.length) continue;
        const last = own[own.length - 1];
        const stack = place(make("div", "dr-free"), at.starts[own[0]], at.starts[last] + at.slots[last], column.line + 1,
          right - 1);
        const alone = free.length === 1 && free[0].kernel;
        if (alone) stack.classList.add("dr-alone");
        stack.append(make("p", "", alone ? "names no stage: one kernel for everything" : "name no stages: in launch order"));
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

  function reveal(state, { implementation, index }, focus) {
    const c = state.data.columns.findIndex((column) => column.name === implementation);
    if (c < 0 || !state.data.columns[c].kernels[index]) return;
    const fold = state.data.columns[c].folds.findIndex(({ members }) => members.includes(index));
    const hidden = !state.visible.has(c) || (fold >= 0 && !state.every && !state.unfolded.has(`${c}.${fold}`));
    state.visible.add(c);
    if (fold >= 0) state.unfolded.add(`${c}.${fold}`);
    state.element.querySelectorAll(".dr-chip")[c]?.setAttribute("aria-pressed", "true");
    if (hidden) draw(state);
    const { node, unit } = state.boxes.get(`${c}.${index}`);
    if (focus) {
      for (const other of state.grid.querySelectorAll(`.dr-box[data-column="${c}"]`)) other.tabIndex = -1;
      node.tabIndex = 0;
      node.focus({ preventScroll: true });
    }
    node.scrollIntoView({ block: focus ? "center" : "nearest", inline: "nearest" });
    highlight(state, { column: state.columns.find((column) => column.c === c), unit });
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

  return { show };
})();
