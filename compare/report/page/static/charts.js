"use strict";
// Draw the charts of a case's page in the colours of the page.
(() => {
  const drawn = new Map(); // figure -> {spec, pick, view}

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
    const entry = drawn.get(figure);
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

  // specs: by the name in a figure's data-chart. bars: the values of the chart of kernels. pick: called with the kernel of
  // a clicked bar.
  xlafuse.charts = async (element, specs, bars, pick) => {
    for (const [figure, entry] of drawn) {
      if (figure.isConnected) continue;
      if (entry.view) entry.view.finalize();
      drawn.delete(figure);
    }
    await xlafuse.module("lib-vega");
    for (const figure of element.querySelectorAll("[data-chart]")) {
      const spec = specs[figure.dataset.chart];
      if (!spec) {
        figure.replaceWith(xlafuse.make("p", "note", "No chart: its numbers were not measured or are unknown."));
        continue;
      }
      const data = figure.dataset.chart === "kernels" ? { values: bars } : spec.data;
      drawn.set(figure, { spec: { ...spec, data }, pick, view: null });
      await draw(figure);
    }
  };
  document.addEventListener("xlafuse:theme", async () => {
    for (const figure of drawn.keys()) if (figure.isConnected) await draw(figure);
  });
})();
