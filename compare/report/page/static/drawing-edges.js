// Lines for the buffers between kernels, drawn over the browser's layout of the grid.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const { path, widthOf, highlight, hide, tipOfEdge } = xlafuse.drawn;

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
      const down = new Map();
      for (const flow of column.flows) if (flow.direct && !flow.minor) down.set(flow.from, [...(down.get(flow.from) || []), flow]);
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

  return { edges };
})());
