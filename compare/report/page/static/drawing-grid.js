// The rows of the grid that each box covers, and the channels next to a column in which edges run.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const WIDEST = 13, THINNEST = 1.25; // pixels, for the case's largest buffer and for very small ones
  const MINOR = 0.02; // of the largest buffer: smaller ones are drawn only for the chosen kernel

  // Each band has as many rows as its fullest track has boxes; the boxes of other tracks share them evenly.

  function units(column, c, state) {
    const folded = new Map();
    const found = [];
    column.folds.forEach((fold, f) => {
      if (state.every || state.unfolded.has(`${c}.${f}`)) return;
      const first = column.kernels[fold.members[0]];
      found.push({ order: fold.members[0], fold, f, members: fold.members, phase: first.phase, piece: first.pieces[0] });
      for (const member of fold.members) folded.set(member, f);
    });
    column.kernels.forEach((kernel, index) => {
      if (folded.has(index)) return;
      const pieces = kernel.pieces.length ? kernel.pieces : [undefined];
      pieces.forEach((piece, p) => found.push({ order: index, kernel, members: [index], phase: kernel.phase, piece,
        first: p === 0 }));
    });
    return found.sort((a, b) => a.order - b.order);
  }

  function tracksOf(own) {
    const tracks = [];
    for (const unit of own) if (unit.piece) (tracks[unit.piece[0]] ||= []).push(unit);
    return Array.from(tracks, (track) => track || []); // a track may be empty because its boxes are folded elsewhere
  }

  const touches = (unit, band) => unit.piece[1] <= band && band <= unit.piece[2];

  function rows(state, columns) {
    const slots = state.data.bands.map((_, band) =>
      Math.max(1, ...columns.flatMap((column) => column.tracks.map((track) => track.filter((u) => touches(u, band)).length))));
    let row = 2;
    const starts = [], titles = [];
    state.data.bands.forEach((band, b) => {
      if (b === 0 || band.phase !== state.data.bands[b - 1].phase) titles.push([row++, band.phase]);
      starts.push(row);
      row += slots[b];
    });
    const slot = (track, unit, band, end) => {
      const own = track.filter((u) => touches(u, band));
      return starts[band] + Math.floor(((own.indexOf(unit) + (end ? 1 : 0)) * slots[band]) / own.length);
    };
    for (const column of columns) for (const track of column.tracks) for (const unit of track) {
      unit.top = slot(track, unit, unit.piece[1], false);
      unit.bottom = slot(track, unit, unit.piece[2], true);
    }
    return { starts, slots, titles, end: row };
  }

  function freeTracks(column, unit) {
    // Count the free tracks to the right in these bands.
    let more = 0;
    for (const track of column.tracks.slice(unit.piece[0] + 1)) {
      if (track.some((other) => other.piece[1] <= unit.piece[2] && unit.piece[1] <= other.piece[2])) break;
      more += 1;
    }
    return more;
  }

  const widthOf = (state, bytes) => Math.max(THINNEST, (WIDEST * bytes) / state.largest);

  function routeEdges(state, columns) {
    // Edges that cannot go straight down run in channels to the right of their column, short ones innermost.
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
      const major = column.flows.filter((flow) => flow.bytes >= MINOR * state.largest);
      column.minor = column.flows.length - major.length;
      const free = column.units.filter((unit) => !unit.piece);
      const row = (unit, end) => (unit.piece ? (end ? unit.bottom : unit.top) : (unit.phase === "backward" ? 1e5 : 0) + free.indexOf(unit));
      for (const flow of column.flows) {
        flow.minor = !major.includes(flow);
        flow.direct = follows(column, flow.from, flow.to);
        flow.span = [Math.min(row(flow.from, true), row(flow.to)) - 0.4, Math.max(row(flow.from, true), row(flow.to)) + 0.4];
      }
      const taken = [];
      const routed = column.flows.filter((flow) => !flow.direct);
      for (const flow of routed.sort((a, b) => a.minor - b.minor || a.span[1] - a.span[0] - b.span[1] + b.span[0])) {
        const fits = (channel) => channel.minor === flow.minor && channel.flows.every((o) => o.span[1] <= flow.span[0] || flow.span[1] <= o.span[0]);
        let channel = taken.find(fits);
        if (!channel) taken.push((channel = { flows: [], width: 0, minor: flow.minor }));
        channel.flows.push(flow);
        channel.width = Math.max(channel.width, widthOf(state, flow.bytes));
        flow.channel = channel;
      }
      let x = 9;
      for (const channel of taken) {
        if (channel.minor) { channel.x = 7; continue; } // only one is shown at a time, so they share a channel
        channel.x = x + channel.width / 2;
        x += channel.width + 4;
      }
      column.gutter = Math.max(26, x + 10);
    }
  }

  function follows(column, from, to) {
    // True if `to` is the next box below `from`; the edge is straight then.
    if (Boolean(from.piece) !== Boolean(to.piece) || (to.piece && to.piece[0] !== from.piece[0])) return false;
    const track = from.piece ? [...column.tracks[from.piece[0]]].sort((a, b) => a.top - b.top)
      : column.units.filter((unit) => !unit.piece && unit.phase === from.phase);
    return track.includes(to) && track.indexOf(to) === track.indexOf(from) + 1;
  }

  return { units, tracksOf, rows, freeTracks, widthOf, routeEdges };
})());
