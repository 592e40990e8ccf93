// The layout of the drawing: the groups of bands, the boxes of each kernel, and the kernels of a column that are folded.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const { number, size } = xlafuse;
  const { bandsOf } = xlafuse.drawn;
  const MOST_BANDS = 20; // a few screens
  const SMALL = 0.03; // share of a column's cost
  const UNFOLDED = 16; // the costliest kernels of a column; a column with fewer folds nothing

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
    for (let small = SMALL; groups.length > MOST_BANDS && small < 1.5; small *= 1.5) groups = neighbours(bands, share, small);
    return groups;
  }

  function neighbours(bands, share, small) {
    const groups = [];
    bands.forEach((band, b) => {
      const joins = b > 0 && bands[b - 1].phase === band.phase && Math.max(share[b - 1], share[b]) < small;
      if (joins) groups.at(-1).push(b);
      else groups.push([b]);
    });
    return groups;
  }

  // Return the boxes of each kernel, [track, first band, last band]; none for a kernel without bands. held: the bands of
  // each kernel, ascending. The boxes of a track follow each other in launch order; two may share a band at their ends.
  // A kernel is one box from its first band to its last, unless one box for each run of adjacent bands needs fewer tracks.
  function pieces(held) {
    const spanning = placed(held.map((bands) => (bands.length ? [[bands[0], bands.at(-1)]] : [])));
    const split = placed(held.map(adjacent));
    return (split.tracks.length < spanning.tracks.length ? split : spanning).boxes;
  }

  function adjacent(bands) {
    const runs = [];
    for (const band of bands) {
      if (runs.at(-1)?.[1] === band - 1) runs.at(-1)[1] = band;
      else runs.push([band, band]);
    }
    return runs;
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

  // Return the launch indices of all but the costliest kernels.
  function lowCost(kernels) {
    const cost = costs(kernels);
    return new Set([...cost.keys()].sort((a, b) => cost[b] - cost[a]).slice(UNFOLDED));
  }

  // Return groups of low-cost kernels in one place: a band of a track, or a phase without bands.
  function folds(kernels) {
    const groups = new Map();
    for (const index of [...lowCost(kernels)].sort((a, b) => a - b)) {
      const { pieces, phase } = kernels[index], place = String(pieces) || phase;
      groups.set(place, [...(groups.get(place) || []), index]);
    }
    return [...groups.values()].filter((members) => members.length > 1)
      .map((members) => ({ members, text: costOf(members.map((index) => kernels[index])) }));
  }

  // Return the total time and bytes of kernels as text, without those of which some are unknown.
  function costOf(kernels) {
    const time = kernels.every(({ us }) => us !== null) && `${number(sum(kernels.map(({ us }) => us)))} µs`;
    const bytes = kernels.every((kernel) => kernel.bytes !== "?") && size(sum(kernels.map(({ declared }) => declared)));
    return [time, bytes].filter(Boolean).join(", ");
  }

  return { layouts, pieces };
})());
