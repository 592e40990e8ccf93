// The layout of the drawing: its data, the groups of bands, the boxes of each kernel, the kernels that are folded, the rows of
// the grid that each box covers, and the channels next to a column in which edges run.
xlafuse.drawn = (() => {
  "use strict";
  const { number, size } = xlafuse;
  const MOST_BUFFERS = 12; // listed for a kernel
  const MOST_BANDS = 20; // a few screens
  const SMALL = 0.03; // share of a column's cost
  const UNFOLDED = 16; // the costliest kernels of a column; a column with fewer folds nothing
  const WIDEST = 13, THINNEST = 1.25; // pixels, for the case's largest buffer and for very small ones
  const MINOR = 0.02; // of the largest buffer: smaller ones are drawn only for the chosen kernel
  const KINDS = { gemm: "gemm", attention: "attention", reduction: "reduction", elementwise: "elementwise",
    copy: "copy", memset: "copy" };

  const kindOf = (kernel) => KINDS[kernel.work] || "other";

  // Return the bands in which a kernel computes, ascending.
  const bandsOf = (kernel) => Object.keys(kernel.ops).filter((band) => band !== "").map(Number);

  // Return the columns with buffers and reasons by text instead of position, and times as numbers.
  function columnsOf(data) {
    return data.columns.map((column) => {
      const buffer = ([place, part]) => {
        const [text, , role] = column.buffers[place];
        return `${part ? `${part} of ` : ""}${text}${role === "intermediate" ? "" : `, ${role}`}`;
      };
      const accesses = (list) => (list === null ? ["unknown"]
        : [...list.slice(0, MOST_BUFFERS).map(buffer), ...(list.length > MOST_BUFFERS ? [`and ${list.length - MOST_BUFFERS} smaller ones`] : [])]);
      const kernels = column.kernels.map((kernel) => ({ ...kernel, reads: accesses(kernel.reads), writes: accesses(kernel.writes),
        us: kernel.us === null ? null : Number(kernel.us), time: kernel.time && `${kernel.time} µs` }));
      const edges = column.edges.map((edge) => {
        const [text, bytes, role] = column.buffers[edge.buffer];
        return { ...edge, text, bytes, role, why: edge.why.map((place) => column.reasons[place]) };
      });
      return { ...column, kernels, edges };
    });
  }

  const sum = (numbers) => numbers.reduce((total, number) => total + number, 0);

  // Return the layouts: with groups of bands if there are any, and with each band for itself.
  function layouts(data, columns) {
    const apart = data.bands.map((_, band) => [band]), groups = grouped(data, columns);
    return [...(groups.length < apart.length ? [groups] : []), apart].map((own) => layout(data, columns, own));
  }

  // Groups are lists of bands. If there are any, a kernel of little cost is only in the one that has most of its stages.
  function layout(data, columns, groups) {
    const groupOf = new Map(groups.flatMap((bands, group) => bands.map((band) => [band, group])));
    const bands = groups.map((group) => {
      const labels = group.map((band) => data.bands[band].label);
      return { ...data.bands[group[0]], ...(group.length > 1 ? { label: `${labels[0]} … ${labels.at(-1)}`, several: labels } : {}) };
    });
    return { ...data, bands, stages: data.bands, columns: columns.map((column) => {
      const brief = groups.length < data.bands.length ? lowCost(column.kernels) : new Set();
      const boxes = pieces(column.kernels.map((kernel, index) => {
        const own = bandsOf(kernel).map((band) => groupOf.get(band));
        return brief.has(index) && own.length ? [mostFrequent(own)] : [...new Set(own)];
      }));
      const kernels = column.kernels.map((kernel, index) => ({ ...kernel, pieces: boxes[index], stages: kernel.ops,
        ops: together(kernel.ops, groups) }));
      return { ...column, kernels, folds: folds(kernels) };
    }) };
  }

  function mostFrequent(list) {
    const times = (value) => list.filter((other) => other === value).length;
    return list.reduce((best, value) => (times(value) > times(best) ? value : best));
  }

  // Return a kernel's operations by group; under "" those outside all bands.
  function together(ops, groups) {
    const found = ops[""] === undefined ? {} : { "": ops[""] };
    groups.forEach((bands, group) => {
      const own = bands.filter((band) => band in ops);
      if (own.length) found[group] = own.map((band) => ops[band]).filter(Boolean).join(", ");
    });
    return found;
  }

  // Return each kernel's time, or its bytes if no time of the column is known.
  function costs(kernels) {
    const timed = kernels.some(({ us }) => us !== null);
    return kernels.map(({ us, declared }) => (timed ? us : declared) ?? 0);
  }

  // Return groups of bands. With more than MOST_BANDS bands, neighbours of little cost in the columns that are visible at
  // first share a group.
  function grouped({ bands, shown }, columns) {
    const share = bands.map(() => 0);
    for (const { kernels } of shown.map((c) => columns[c])) {
      const cost = costs(kernels), all = sum(cost) || 1, own = bands.map(() => 0);
      kernels.forEach((kernel, index) => {
        const held = bandsOf(kernel);
        for (const band of held) own[band] += cost[index] / held.length / all;
      });
      own.forEach((part, band) => { share[band] = Math.max(share[band], part); });
    }
    let groups = bands.map((_, band) => [band]);
    for (let small = SMALL; groups.length > MOST_BANDS && small < 1.5; small *= 1.5) {
      groups = runs([...bands.keys()], (a, b) => bands[a].phase === bands[b].phase && Math.max(share[a], share[b]) < small);
    }
    return groups;
  }

  // Return a list cut into runs. joins: tells whether an item shares a run with the one before it.
  function runs(list, joins) {
    const found = [];
    for (const item of list) {
      if (found.length && joins(found.at(-1).at(-1), item)) found.at(-1).push(item);
      else found.push([item]);
    }
    return found;
  }

  // Return the boxes of each kernel, [track, first band, last band]; none for a kernel without bands. held: the bands of
  // each kernel, ascending. The boxes of a track follow each other in launch order; two may share a band at their ends.
  // A kernel is one box from its first band to its last, unless one box for each run of adjacent bands needs fewer tracks.
  function pieces(held) {
    const spanning = placed(held.map((bands) => (bands.length ? [[bands[0], bands.at(-1)]] : [])));
    const adjacent = (bands) => runs(bands, (a, b) => b === a + 1).map((run) => [run[0], run.at(-1)]);
    const split = placed(held.map(adjacent));
    return (split.tracks.length < spanning.tracks.length ? split : spanning).boxes;
  }

  // Put each run of bands into the first track in which it lies below or entirely above each earlier one.
  function placed(wanted) {
    const tracks = [];
    const boxes = wanted.map((runs) => runs.map(([first, last]) => {
      const free = tracks.findIndex((taken) => taken.every(([start, end]) => end <= first || last < start));
      const track = free < 0 ? tracks.push([]) - 1 : free;
      tracks[track].push([first, last]);
      return [track, first, last];
    }));
    return { boxes, tracks };
  }

  // Return the launch indices of all but the costliest kernels. Of kernels that do the same work, as in every layer, the
  // first stands for all. A short column has none.
  function lowCost(kernels) {
    if (kernels.length <= UNFOLDED) return new Set();
    const cost = costs(kernels), total = kernels.map(() => 0);
    kernels.forEach(({ same }, index) => { total[same] += cost[index]; });
    const first = [...total.keys()].filter((index) => kernels[index].same === index);
    const shown = new Set(first.sort((a, b) => total[b] - total[a]).slice(0, UNFOLDED));
    return new Set([...total.keys()].filter((index) => !shown.has(index)));
  }

  // Return groups of low-cost kernels in one place: a band of a track, or a phase without bands.
  function folds(kernels) {
    const placeOf = (index) => String(kernels[index].pieces) || kernels[index].phase;
    const groups = Map.groupBy([...lowCost(kernels)].sort((a, b) => a - b), placeOf);
    return [...groups.values()].filter((members) => members.length > 1)
      .map((members) => ({ members, text: costOf(members.map((index) => kernels[index])) }));
  }

  // Return the total time and bytes of kernels as text, without those of which some are unknown.
  function costOf(kernels) {
    const time = kernels.every(({ us }) => us !== null) && `${number(sum(kernels.map(({ us }) => us)))} µs`;
    const bytes = kernels.every((kernel) => kernel.bytes !== "?") && size(sum(kernels.map(({ declared }) => declared)));
    return [time, bytes].filter(Boolean).join(", ");
  }

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
      const ends = column.edges.map((edge) => ({ edge, from: unitOf.get(edge.from).tail, to: unitOf.get(edge.to).head }));
      const place = (unit) => column.units.indexOf(unit);
      const flows = Map.groupBy(ends.filter(({ from, to }) => from !== to),
        ({ edge, from, to }) => `${place(from)}>${place(to)}>${edge.role === "saved"}`);
      column.flows = [...flows.values()].map((group) => ({ ...group[0], edges: group.map(({ edge }) => edge),
        bytes: sum(group.map(({ edge }) => edge.bytes)) }));
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

  return { kindOf, bandsOf, columnsOf, layouts, pieces, units, tracksOf, rows, freeTracks, widthOf, routeEdges };
})();
