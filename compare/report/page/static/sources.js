// The sources of a case: a listing for each document, with the kernels of each line.
xlafuse.sources = (() => {
  "use strict";
  const { button, make } = xlafuse;
  const MOST = 20000; // lines shown
  const BLOCK = 100; // lines that the browser lays out together
  const states = new WeakMap();

  async function show(element, data, options = {}) {
    let state = states.get(element);
    if (!state || state.data !== data) {
      state = { element, data, record: 0, document: 0, kernel: null };
      states.set(element, state);
      frame(state);
    }
    state.options = { ...state.options, ...options };
    if (options.kernel) {
      const record = data.records.findIndex(({ name }) => name === options.kernel.implementation);
      if (record < 0) return;
      const { documents, kernels } = data.records[record];
      const has = (document) => documents[document]?.kernels[options.kernel.index];
      const current = record === state.record && has(state.document) ? state.document : documents.findIndex((_, d) => has(d));
      state.record = record;
      state.document = Math.max(0, current);
      state.kernel = kernels[options.kernel.index] === undefined ? null : options.kernel.index;
    }
    const line = options.line || options.kernel?.line;
    const at = line && place(data.records[state.record], line);
    if (at) state.document = at.document;
    await draw(state, at?.line);
    // Focus stays in the list of kernels while the reader goes through it.
    if (options.focus && !state.head.contains(document.activeElement)) {
      (state.code.hidden ? state.records.children[state.record] : state.code)?.focus({ preventScroll: true });
    }
  }

  // Return the document and line of "file.py:12" in a record.
  function place(record, line) {
    const [, file, number] = /^(.*):(\d+)$/s.exec(line) || [];
    const document = record ? record.documents.findIndex(({ title }) => title === file) : -1;
    return document < 0 ? null : { document, line: Number(number) };
  }

  function frame(state) {
    const { element, data } = state;
    const root = make("div", "so");
    state.records = tabs("Implementations", data.records.map(({ name }) => name), (record) => {
      Object.assign(state, { record, document: 0, kernel: null, clicked: null });
      draw(state);
    });
    data.records.forEach(({ name }, r) => state.records.children[r].style.setProperty("--so-own", xlafuse.colour(name)));
    state.head = make("div", "so-head");
    state.note = make("p", "so-note");
    state.code = make("div", "so-code", undefined, { tabindex: "0", role: "region", "aria-label": "Source" });
    state.code.addEventListener("keydown", (event) => move(state, event));
    state.files = make("div", "so-files");
    root.append(state.records, state.head, state.note, state.code, state.files);
    element.replaceChildren(root);
  }

  function tabs(label, names, pick) {
    const group = make("div", "so-tabs", undefined, { role: "group", "aria-label": label });
    group.append(...names.map((name, n) => button("so-tab", name, () => pick(n), { title: name })));
    return group;
  }

  const press = (group, chosen) => [...group.children].forEach((tab, t) => tab.setAttribute("aria-pressed", t === chosen));

  async function draw(state, line) {
    const { data, head, code } = state;
    const record = data.records[state.record];
    const request = (state.request = {});
    press(state.records, state.record);
    const choosing = head.querySelector("select") === document.activeElement;
    head.replaceChildren();
    code.replaceChildren();
    code.hidden = true;
    if (!record) { state.note.textContent = "No sources in this run's folder."; return; }
    const shown = record.documents[state.document];
    const documents = tabs("Documents", record.documents.map(({ title }) => title), (document) => {
      state.document = document;
      draw(state);
    });
    press(documents, state.document);
    head.append(documents, chooser(state, record, shown));
    if (choosing) head.querySelector("select").focus({ preventScroll: true });
    if (state.kernel !== null) head.append(links(state, record, shown));
    state.note.textContent = [record.note, shown?.note].filter(Boolean).join("; ")
      || (shown ? "" : record.files.length ? "No source text is available; compiled files:"
        : "The run kept no source text here.");
    state.note.hidden = !state.note.textContent;
    files(state, record);
    if (!shown) return;
    const text = shown.text === undefined ? (await xlafuse.load("programs"))[shown.title] : data.texts[shown.text];
    if (state.request !== request) return;
    code.hidden = false;
    listing(state, record, shown, text);
    go(state, shown, line);
  }

  // Return links from the chosen kernel to its lines and its box, and to other kernels of the clicked line.
  function links(state, record, shown) {
    const line = make("p", "so-jumps", `kernel ${state.kernel + 1}`);
    const jump = (text, act) => line.append(" ", button("so-jump", text, act));
    const spans = shown?.kernels[state.kernel] || [];
    if (spans.length) line.append(" in this text:");
    for (const [first, last] of spans.slice(0, 12)) {
      jump(first === last ? `line ${first}` : `lines ${first} to ${last}`, () => scroll(state, state.lines.get(first)));
    }
    if (state.options.onBox) jump("its box in the graph \u2192", () => state.options.onBox({ implementation: record.name, index: state.kernel }));
    const others = clicked(state) ? kernelsAt(shown, state.clicked.number).filter((index) => index !== state.kernel) : [];
    if (others.length) line.append(`; line ${state.clicked.number} is also of`);
    for (const index of others.slice(0, 12)) jump(`kernel ${index + 1}`, () => pick(state, index));
    if (others.length > 12) line.append(` and ${others.length - 12} more`);
    return line;
  }

  const clicked = (state) => state.clicked && state.clicked.record === state.record && state.clicked.document === state.document;

  // Return the kernels of a line, those with the fewest lines first.
  function kernelsAt(shown, number) {
    const found = [];
    for (const [index, spans] of Object.entries(shown.kernels)) {
      const lengths = spans.filter(([first, last]) => first <= number && number <= last).map(([first, last]) => last - first);
      if (lengths.length) found.push([Math.min(...lengths), Number(index)]);
    }
    return found.sort((a, b) => a[0] - b[0] || a[1] - b[1]).map(([, index]) => index);
  }

  function chooser(state, record, shown) {
    const label = make("label", "so-choose", "kernel ");
    const select = make("select");
    select.append(make("option", "", "…", { value: "" }));
    record.kernels.forEach((name, index) => {
      const option = make("option", "", `${index + 1} ${name}`, { value: index });
      if (!shown?.kernels[index]) option.textContent += " (not in this text)";
      select.append(option);
    });
    select.value = state.kernel ?? "";
    select.addEventListener("change", () => {
      state.clicked = null;
      pick(state, select.value === "" ? null : Number(select.value));
    });
    label.append(select);
    return label;
  }

  function pick(state, index) {
    state.kernel = index;
    const record = state.data.records[state.record];
    const kernel = { implementation: record.name, index };
    if (index === null) draw(state);
    else if (state.options.onKernel) state.options.onKernel(kernel); // shows it here, too
    else show(state.element, state.data, { kernel });
  }

  function listing(state, record, shown, { language, lines, places }) {
    const kept = lines.flatMap((content, l) => (content === null ? [] : [{ number: l + 1, content }]));
    const held = new Map(); // line number -> kernels that begin there; an empty set within a kernel
    for (const [index, spans] of Object.entries(shown.kernels)) for (const [first, last] of spans) {
      let begun = false;
      for (let number = first; number <= last; number++) {
        if (typeof lines[number - 1] !== "string") continue;
        if (!held.has(number)) held.set(number, new Set());
        if (!begun) held.get(number).add(Number(index));
        begun = true;
      }
    }
    state.lines = new Map();
    const highlight = highlighter(language);
    let block;
    kept.slice(0, MOST).forEach(({ number, content }, position) => {
      if (position % BLOCK === 0) state.code.append((block = make("div", "so-block")));
      const left = position && number - kept[position - 1].number - 1;
      if (left) block.append(make("div", "so-gap", left === 1 ? "1 line left out" : `${left} lines left out`));
      const row = make("div", "so-line");
      row.dataset.line = number;
      const marks = make("span", "so-marks");
      if (held.has(number)) {
        row.classList.add("so-held");
        row.addEventListener("click", (event) => {
          if (event.target.closest("button") || !getSelection().isCollapsed) return; // the reader is selecting text
          state.clicked = { record: state.record, document: state.document, number };
          pick(state, kernelsAt(shown, number)[0]);
        });
        marks.append(...marksOf(state, record, number, [...held.get(number)]));
      }
      const words = make("span", "so-text");
      highlight(words, content);
      row.append(marks, words);
      if (number in places) row.append(placeLink(state, record, places[number]));
      block.append(row);
      state.lines.set(number, row);
    });
    if (kept.length > MOST) state.code.append(make("div", "so-gap", `${(kept.length - MOST).toLocaleString("en")} more lines are in the run's dumps`));
    const first = state.code.querySelector(".so-mark, .so-place");
    if (first) first.tabIndex = 0;
  }

  // Return the marks of the kernels that begin at a line.
  function marksOf(state, record, number, kernels) {
    const name = (index) => record.kernels[index];
    const marks = kernels.slice(0, 4).map((index) => button("so-mark", index + 1, () => {
      state.clicked = null;
      pick(state, index);
    }, { tabindex: "-1", title: `kernel ${name(index)}`, "aria-label": `line ${number} is of kernel ${index + 1}, ${name(index)}` }));
    const more = kernels.slice(4);
    const title = more.map((index) => `${index + 1} ${name(index)}`).join("\n");
    return more.length ? [...marks, make("span", "so-more", `+${more.length}`, { title })] : marks;
  }

  // Return a line's place in the program, which is a link if the page has that file.
  function placeLink(state, record, source) {
    const short = source.split("/").pop(), title = { title: source };
    if (!place(record, source)) return make("span", "so-place", short, title);
    return button("so-place", short, () => show(state.element, state.data, { line: source }), { tabindex: "-1", ...title });
  }

  function go(state, shown, line) {
    let target = line ? state.lines.get(line) : null;
    if (!line && clicked(state) && kernelsAt(shown, state.clicked.number).includes(state.kernel)) {
      target = state.lines.get(state.clicked.number); // keep it in view
    }
    for (const [first, last] of (state.kernel !== null && shown.kernels[state.kernel]) || [])
      for (let number = first; number <= last; number++) {
        const row = state.lines.get(number);
        row?.classList.add("so-chosen");
        target ||= row;
      }
    if (line) state.lines.get(line)?.classList.add("so-target");
    scroll(state, target);
  }

  function scroll(state, target) {
    // Scroll the listing, never the page. Repeat it, since blocks get their real heights when they come into view.
    const { code } = state;
    const to = () => {
      const above = target ? target.getBoundingClientRect().top - code.getBoundingClientRect().top : -code.scrollTop;
      code.scrollTop += above - (target ? code.clientHeight / 4 : 0);
    };
    to();
    requestAnimationFrame(() => { to(); requestAnimationFrame(to); });
  }

  function files(state, record) {
    state.files.replaceChildren();
    if (!record.files.length) return;
    const own = record.files.filter(({ kernels }) => state.kernel !== null && kernels.includes(state.kernel));
    const list = (found, title) => {
      const paragraph = make("p", "", title);
      for (const { title: name, href } of found) paragraph.append(" ", make("a", "", name, { href, target: "_blank", rel: "noopener" }));
      return paragraph;
    };
    if (own.length) state.files.append(list(own, `kernel ${state.kernel + 1}, in separate files:`));
    const all = make("details");
    all.append(make("summary", "", `all ${record.files.length} files of ${record.name}, next to this page`), list(record.files, ""));
    state.files.append(all);
  }

  function move(state, event) {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (!step || !event.target.matches(".so-mark, .so-place")) return;
    event.preventDefault();
    const all = [...state.code.querySelectorAll("button.so-mark, button.so-place")];
    const next = all[all.indexOf(event.target) + step];
    if (!next) return;
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  }

  // Syntax highlighting happens in the browser: markup for every token would take more bytes than the text itself.
  const span = (kind, text) => make("span", `so-${kind}`, text);
  const words = (text) => `\\b(?:${text.split(" ").join("|")})\\b`;
  const LANGUAGES = {
    python: {
      comment: "#.*", string: `"(?:[^"\\\\]|\\\\.)*"|'(?:[^'\\\\]|\\\\.)*'`, number: "\\b(?:0x[\\da-fA-F]+|\\d[\\d_]*(?:\\.\\d*)?(?:e[+-]?\\d+)?)\\b",
      keyword: words("and as assert break class continue def del elif else except False finally for from if import in is lambda None not or pass raise return True try while with yield"),
      name: "@[\\w.]+|\\b[A-Za-z_][\\w.]*(?=\\()", },
    cuda: {
      comment: "//.*|/\\*.*?\\*/", string: `"(?:[^"\\\\]|\\\\.)*"`, number: "\\b(?:0x[\\da-fA-F]+|\\d[\\d']*(?:\\.\\d*)?(?:e[+-]?\\d+)?[fuUlL]*)\\b",
      keyword: words("auto bool break case const constexpr continue do double else false float for if inline int long return short static struct switch template true typename unsigned using void while __device__ __global__ __shared__ __restrict__"),
      name: "#\\w+|\\b[A-Za-z_]\\w*(?=\\()", },
    hlo: {
      comment: "/\\*.*?\\*/", string: `"(?:[^"\\\\]|\\\\.)*"`, keyword: words("ENTRY ROOT HloModule"),
      type: "\\b(?:pred|bf16|token|[fsuc]\\d+\\w*)\\[[^\\]]*\\](?:\\{[^}]*\\})?", name: "\\b[a-z][a-z0-9-]*(?=\\()", value: "%[^\\s,(){}=]+", },
  };
  const patterns = new Map();

  // Return a function (element, line) that adds the lines of one text, in order, to elements.
  function highlighter(language) {
    const kinds = LANGUAGES[language] || {};
    if (!patterns.has(language)) patterns.set(language,
      new RegExp(Object.entries(kinds).map(([kind, pattern]) => `(?<${kind}>${pattern})`).join("|") || "(?!)", "g"));
    const pattern = patterns.get(language);
    let within = false; // within a docstring
    return (node, text) => {
      const quotes = language === "python" ? text.split('"""').length - 1 : 0;
      if (within || quotes % 2) {
        const start = within ? 0 : text.indexOf('"""');
        node.append(text.slice(0, start), span("string", text.slice(start)));
        if (quotes % 2) within = !within;
        return;
      }
      let end = 0;
      for (const match of text.matchAll(pattern)) {
        const kind = Object.keys(match.groups).find((name) => match.groups[name] !== undefined);
        node.append(text.slice(end, match.index), span(kind, match[0]));
        end = match.index + match[0].length;
      }
      node.append(text.slice(end));
    };
  }

  return { show };
})();
