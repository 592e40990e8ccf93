// Of a drawing: which rows of the browser's grid a box takes, and the tracks beside a column in which edges run.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const WIDEST = 13, THINNEST = 1.25; // pixels, of the case's largest buffer, and of what is nothing beside it
  const TELLING = 0.02; // of the largest buffer: smaller ones are drawn for the kernel chosen alone

  // Rows: each band has as many slots as its fullest lane; boxes of emptier lanes share them evenly.

  function units(column, c, state) {
    const folded = new Map();
    const found = [];
    column.folds.forEach((fold, f) => {
      if (state.every || state.unfolded.has(`${c}.${f}`)) return;
      const first = column.kernels[fold.members[0]];
      found.push({ order: fold.members[0], fold, f, members: fold.members, part: first.part, piece: first.pieces[0] });
      for (const member of fold.members) folded.set(member, f);
    });
    column.kernels.forEach((kernel, index) => {
      if (folded.has(index)) return;
      const pieces = kernel.pieces.length ? kernel.pieces : [undefined];
      pieces.forEach((piece, p) => found.push({ order: index, kernel, members: [index], part: kernel.part, piece,
        first: p === 0 }));
    });
    return found.sort((a, b) => a.order - b.order);
  }

  function lanesOf(own) {
    const lanes = [];
    for (const unit of own) if (unit.piece) (lanes[unit.piece[0]] ||= []).push(unit);
    return Array.from(lanes, (lane) => lane || []); // a lane may hold nothing but what is folded elsewhere
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

  function spare(column, unit) {
    // Lanes to the right that nothing else uses in these bands.
    let more = 0;
    for (const lane of column.lanes.slice(unit.piece[0] + 1)) {
      if (lane.some((other) => other.piece[1] <= unit.piece[2] && unit.piece[1] <= other.piece[2])) break;
      more += 1;
    }
    return more;
  }

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
        else flows.set(key, { from, to, edges: [edge], bytes: edge.bytes });
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

  return { units, lanesOf, rows, spare, widthOf, tracks };
})());
