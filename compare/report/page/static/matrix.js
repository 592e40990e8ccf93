"use strict";
// The filter of the front page's matrix, by row and column. Columns of implementations without fusion are folded.
(() => {
  const lines = () => [...document.querySelectorAll("#matrix tbody tr")];
  const heads = () => [...document.querySelectorAll("#matrix thead th")];
  const FIRST = 2; // the first column of an implementation
  const textOf = (row) => `${row.cells[0].textContent} ${row.cells[1].textContent}`.toLowerCase();

  // A word selects columns if it is an implementation's name or no case contains it; otherwise it selects rows.
  function classify(words) {
    const names = heads().slice(FIRST).map((head) => head.textContent.toLowerCase());
    const texts = lines().map(textOf);
    const columns = [], cases = [];
    for (const word of words) {
      const own = names.includes(word) || !texts.some((text) => text.includes(word));
      (own && names.some((name) => name.includes(word)) ? columns : cases).push(word);
    }
    return { columns, cases };
  }

  function filter(typed) {
    const folded = (c) => heads()[c].classList.contains("unfused") && !unfused?.checked;
    const { columns, cases } = classify(typed.toLowerCase().split(/\s+/).filter(Boolean));
    const names = heads().map((head, c) => (c >= FIRST ? head.textContent.toLowerCase() : ""));
    const named = columns.map((word) => names.flatMap((name, c) =>
      ((names.includes(word) ? name === word : name.includes(word)) ? [c] : [])));
    const wanted = new Set(named.flat());
    const has = (row, c) => !row.cells[c].classList.contains("none");
    let block = null;
    const filled = new Set();
    for (const row of lines()) {
      const text = textOf(row);
      row.hidden = !cases.every((word) => text.includes(word)) || !named.every((some) => some.some((c) => has(row, c)));
      if (row.hidden) continue;
      row.cells[0].classList.toggle("again", row.cells[0].textContent === block);
      block = row.cells[0].textContent;
      for (let c = FIRST; c < row.cells.length; c++) if (has(row, c) && (wanted.size ? wanted.has(c) : !folded(c))) filled.add(c);
    }
    for (const row of document.querySelectorAll("#matrix tr")) {
      [...row.cells].forEach((cell, c) => { cell.hidden = c >= FIRST && !filled.has(c); });
    }
    const none = block === null;
    document.getElementById("matrix").hidden = none;
    document.getElementById("matrix-none").textContent = none ? `No row matches \u201c${typed.trim()}\u201d.` : "";
  }
  const typed = document.getElementById("matrix-filter");
  const unfused = document.getElementById("matrix-unfused"); // null if no implementation is without fusion
  if (!typed) return; // a page without records
  typed.addEventListener("input", () => filter(typed.value));
  unfused?.addEventListener("change", () => filter(typed.value));
  filter(typed.value);
})();
