"use strict";
// Draws the pictures of a case's page, in the colours of the page.
(() => {
  const alive = new Map(); // figure -> {spec, pick, view}

  function config() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const ink = colour("--ink"), line = colour("--line"), muted = colour("--muted");
    return {
      background: "transparent",
      font: colour("--sans"),
      axis: {
        labelColor: ink, titleColor: muted, gridColor: line, domainColor: line, tickColor: line, labelLimit: 220,
        titleFontWeight: "normal", labelFontSize: 12, titleFontSize: 12,
      },
      legend: { labelColor: ink, titleColor: muted, labelFontSize: 12, labelLimit: 260 },
      view: { stroke: null },
      text: { color: ink, fontSize: 12 }, rule: { color: ink }, line: { color: muted }, point: { color: ink },
    };
  }

  async function draw(figure) {
    const entry = alive.get(figure);
    if (entry.view) entry.view.finalize();
    const result = await window.vegaEmbed(figure, entry.spec, {
      mode: "vega-lite", actions: false, renderer: "svg", logLevel: 1, config: config(), tooltip: { theme: xlafuse.theme() },
    });
    entry.view = result;
    result.view.addEventListener("click", (_, item) => {
      const datum = item && item.datum;
      if (datum && Number.isInteger(datum.index)) {
        entry.pick({ implementation: datum.implementation, index: datum.index });
      }
    });
  }

  // specs: by the name that a figure's data-chart gives. bars: values of the one of kernels. pick: called with the kernel
  // of a bar that was clicked.
  xlafuse.charts = async (element, specs, bars, pick) => {
    for (const [figure, entry] of alive) {
      if (figure.isConnected) continue;
      if (entry.view) entry.view.finalize();
      alive.delete(figure);
    }
    await xlafuse.module("lib-vega");
    for (const figure of element.querySelectorAll("[data-chart]")) {
      const spec = specs[figure.dataset.chart];
      if (!spec) {
        figure.replaceWith(Object.assign(document.createElement("p"), {
          className: "note", textContent: "Nothing to draw: what this picture needs was not measured, or is not known.",
        }));
        continue;
      }
      const data = figure.dataset.chart === "kernels" ? { values: bars } : spec.data;
      alive.set(figure, { spec: { ...spec, data }, pick, view: null });
      await draw(figure);
    }
  };
  document.addEventListener("xlafuse:theme", async () => {
    for (const figure of alive.keys()) if (figure.isConnected) await draw(figure);
  });
})();
