// Make elements and texts. Text comes from the run, so it is set only as textContent.
"use strict";
(() => {
  const make = (tag, className, text, attributes = {}) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text !== undefined) node.textContent = text;
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    return node;
  };

  // act: called when the button is clicked.
  const button = (className, text, act, attributes = {}) => {
    const node = make("button", className, text, { type: "button", ...attributes });
    node.addEventListener("click", act);
    return node;
  };

  // columns: [heading, class of the cells]. rows: lists of texts or nodes.
  const table = (className, columns, rows) => {
    const node = make("table", className);
    const head = node.createTHead().insertRow();
    for (const [text, own] of columns) head.append(make("th", own === "num" ? own : "", text, { scope: "col" }));
    const body = node.createTBody();
    for (const contents of rows) {
      const cells = contents.map((_, c) => make("td", columns[c][1]));
      cells.forEach((cell, c) => cell.append(contents[c]));
      body.insertRow().append(...cells);
    }
    return node;
  };

  // Long names of compilers break best after an underscore or a dot.
  const breakable = (node, text) => {
    text.split(/(?<=[_./])(?=\w)/).forEach((piece, i) => node.append(...(i ? [make("wbr")] : []), piece));
    return node;
  };

  const count = (many, one) => `${many.toLocaleString("en")} ${one}${many === 1 ? "" : "s"}`;

  // Return a number with three digits and without exponent, as compare/base/text.py does.
  const number = (value) => {
    if (value === 0) return "0";
    const decimals = Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value))));
    return value.toFixed(Math.min(decimals, 20));
  };

  // Return bytes with three digits, as compare/graph/formats.py does.
  const threeDigits = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, useGrouping: false, roundingMode: "halfEven" });
  const size = (bytes) => {
    for (const [unit, scale] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
      const scaled = Number(threeDigits.format(bytes / scale));
      if (scaled >= 1) return `${number(scaled)} ${unit}`;
    }
    return `${bytes} B`;
  };

  Object.assign(xlafuse, { make, button, table, breakable, count, number, size });
})();
