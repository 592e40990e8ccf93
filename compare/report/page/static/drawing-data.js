// The drawing's data, and helpers that other parts of the drawing use.
xlafuse.drawn = (() => {
  "use strict";
  const SVG = "http://www.w3.org/2000/svg";
  const MOST_BUFFERS = 12; // listed for a kernel
  const KINDS = { gemm: "gemm", attention: "attention", reduction: "reduction", elementwise: "elementwise",
    copy: "copy", memset: "copy" };

  function path(className, d, width) {
    const node = document.createElementNS(SVG, "path");
    node.setAttribute("class", className);
    node.setAttribute("d", d);
    node.style.strokeWidth = `${width}px`;
    return node;
  }

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

  return { SVG, path, kindOf, bandsOf, columnsOf };
})();
