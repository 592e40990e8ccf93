"use strict";
// The table of all records, made by DataTables when its page first opens.
(() => {
  let table = null;

  const { make, number } = xlafuse;
  const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
  const numeric = { number, count: String, percent: (value) => `${Math.round(value * 100)}%` };
  const shown = (kind, value) => (value === null ? "" : (numeric[kind] || escaped)(value));

  // Add sort orders to DataTables that put unknown values last in both directions.
  function addOrders(library) {
    const orders = library.ext.type.order;
    for (const [name, compare] of [["number", (a, b) => a - b], ["text", (a, b) => (a < b ? -1 : a > b ? 1 : 0)]]) {
      const unknown = (a, b) => (a === "") - (b === "");
      orders[`known-${name}-asc`] = (a, b) => (a === "" || b === "" ? unknown(a, b) : compare(a, b));
      orders[`known-${name}-desc`] = (a, b) => (a === "" || b === "" ? unknown(a, b) : compare(b, a));
    }
  }

  const FIXED = new Set(["block", "case", "implementation"]); // stay visible while the table scrolls (page.css)
  const LONGEST = 28; // characters in a column

  // Return the width of a column in characters over all rows, so that sorting and filters do not change it.
  function width(spec, place, rows) {
    const longest = Math.max(...rows.map((row) => shown(spec.kind, row[place]).length));
    return Math.min(LONGEST, Math.max(longest, spec.title.length + 2)) + 2;
  }

  function column(spec, links) {
    const isNumber = spec.kind in numeric;
    return {
      title: escaped(spec.title), type: isNumber ? "known-number" : "known-text",
      className: [isNumber ? "dt-right" : "dt-left", FIXED.has(spec.title) ? `fixed fixed-${spec.title}` : ""].join(" "),
      render: (value, type, row) => {
        if (type !== "display") return value ?? "";
        if (spec.kind === "case") return `<a href="${escaped(links[row[row.length - 1]])}">${escaped(value)}</a>`;
        return shown(spec.kind, value);
      },
    };
  }

  // Return the values by which a filter finds a cell: each word of "compiled 3, not autotuned 1".
  const choices = (spec, value) => (spec.kind === "counted" ? value.split(", ").map((word) => word.replace(/ \d+$/, "")) : [value]);

  function addFilters(table, data) {
    const bar = document.getElementById("records-filters");
    data.columns.forEach((spec, place) => {
      const values = [...new Set(data.rows.flatMap((row) => choices(spec, row[place] ?? "")))];
      if (!["filter", "counted"].includes(spec.kind) || values.length < 2) return;
      const select = make("select", "", undefined, { "aria-label": spec.title });
      select.append(new Option(spec.title, ""));
      values.sort().forEach((value) => select.append(new Option(value === "" ? "(none)" : value, `=${value}`)));
      select.addEventListener("change", () => {
        const wanted = select.value;
        table.column(place).search(wanted === "" ? "" : (cell) => choices(spec, cell).some((own) => `=${own}` === wanted)).draw();
      });
      bar.append(select);
    });
  }

  function explain(columns) {
    const list = document.getElementById("records-help");
    for (const { title, help } of columns) list.append(make("dt", "", title), make("dd", "", help));
  }

  xlafuse.records = () => (table ||= tableOfRecords());
  async function tableOfRecords() {
    const [data, style, library] = await Promise.all([
      xlafuse.load("rows"), xlafuse.loadText("lib-tables-style"), xlafuse.module("lib-tables"),
    ]);
    document.head.prepend(make("style", "", style)); // our style sheet follows
    const rows = data.rows.map((row, number) => [...row, number]); // the last, hidden cell finds the link
    const columns = data.columns.map((spec) => column(spec, data.links));
    columns.push({ visible: false, searchable: false });
    addOrders(library.default);
    const widths = data.columns.map((spec, index) => width(spec, index, data.rows));
    const element = document.getElementById("records");
    element.style.width = `${widths.reduce((sum, own) => sum + own, 0)}ch`;
    columns.forEach((own, place) => { if (place < widths.length) own.width = `${widths[place]}ch`; });
    const made = new library.default(element, {
      data: rows, columns, deferRender: true, pageLength: 50, lengthMenu: [25, 50, 100, 500], order: [],
      autoWidth: false, layout: { topStart: "search", topEnd: "pageLength", bottomStart: "info", bottomEnd: "paging" },
      language: { search: "search " },
    });
    for (const title of FIXED) {
      const head = element.querySelector(`th.fixed-${title}`);
      element.style.setProperty(`--${title}-left`, `${head.offsetLeft}px`);
    }
    addFilters(made, data);
    explain(data.columns);
    return made;
  }
})();
