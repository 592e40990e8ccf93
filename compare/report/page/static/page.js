"use strict";
// The page: decompresses embedded data, switches between pages by the address, and fills a case's page when it opens.
window.xlafuse = {};
(() => {
  const CASES_PER_ELEMENT = Number(document.body.dataset.casesPerElement);
  const values = new Map();

  // Restore lists of objects that are stored by key (compare/report/page/embed.py).
  function restored(value) {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(restored);
    const entries = Object.entries(value).map(([key, own]) => [key, restored(own)]);
    if (entries.length !== 1 || entries[0][0] !== "=") return Object.fromEntries(entries.map(([key, own]) => [unescaped(key), own]));
    const fields = Object.entries(entries[0][1]);
    return fields[0][1].map((_, i) => Object.fromEntries(fields.map(([key, own]) => [key, own[i]])));
  }
  const unescaped = (key) => (key.startsWith("==") ? key.slice(1) : key);
  // Return the data of the run or of one case; null if there is none. compare/report/page/embed.py writes them.
  xlafuse.load = async (kind, number) => {
    const chunk = number === undefined ? kind : `${kind}-${Math.floor(number / CASES_PER_ELEMENT)}`;
    if (!values.has(chunk)) values.set(chunk, xlafuse.loadText(chunk).then(JSON.parse).then(restored));
    const found = await values.get(chunk);
    return number === undefined ? found : found[number % CASES_PER_ELEMENT];
  };
  // Return the text of an embedded element.
  xlafuse.loadText = async (id) => {
    const element = document.getElementById(id);
    if (!element) throw new Error(`no embedded element ${id}`);
    const packed = Uint8Array.from(atob(element.textContent), (c) => c.charCodeAt(0));
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  };
  // Import an embedded library, an ES module.
  const modules = new Map();
  xlafuse.module = (id) => {
    if (!modules.has(id)) {
      modules.set(id, xlafuse.loadText(id).then((text) => {
        const url = URL.createObjectURL(new Blob([text], { type: "text/javascript" }));
        return import(url).finally(() => URL.revokeObjectURL(url));
      }));
    }
    return modules.get(id);
  };

  // The theme, light or dark.
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  let chosenTheme = null;
  xlafuse.theme = () => root.dataset.theme;
  function setTheme(name) {
    if (root.dataset.theme === name && root.classList.contains("dark") === (name === "dark")) return;
    root.dataset.theme = name;
    root.classList.toggle("dark", name === "dark"); // DataTables reads this class
    document.dispatchEvent(new Event("xlafuse:theme"));
  }
  const preferred = () => (dark.matches ? "dark" : "light");
  setTheme(preferred());
  dark.addEventListener("change", () => chosenTheme || setTheme(preferred()));
  document.getElementById("theme").addEventListener("click", () => {
    chosenTheme = xlafuse.theme() === "dark" ? "light" : "dark";
    setTheme(chosenTheme);
  });
  window.addEventListener("beforeprint", () => {
    document.querySelectorAll("main details.kernels").forEach(xlafuse.kernels.open);
    setTheme("light");
  });
  window.addEventListener("afterprint", () => setTheme(chosenTheme || preferred()));

  // Pages.
  const article = document.getElementById("case");
  const pages = new Map([["", "overview"], ["records", "records-page"], ["about", "about"]]);
  const scrollPositions = new Map(); // by page, to restore on return
  let shown = null;
  let settings = null;
  xlafuse.colour = (name) => (settings && settings.colours[name]) || "#8c8c8c";

  // Return the number of the case that an address names, percent-encoded or not; -1 for none.
  function caseNumber(hash) {
    const number = settings.links.indexOf(hash);
    if (number >= 0 || !hash.startsWith("#/case/")) return number;
    return settings.cases.indexOf(hash.slice("#/case/".length).split("/").map(decoded).join("/"));
  }
  function decoded(piece) {
    try { return decodeURIComponent(piece); } catch { return piece; }
  }

  async function route() {
    settings = settings || (await xlafuse.load("settings"));
    const hash = location.hash || settings.home;
    if (!hash.startsWith("#/")) return; // an anchor within the page
    if (shown !== null) scrollPositions.set(shown, window.scrollY);
    const moved = shown !== null; // false when the file opens: Tab then starts at the top
    shown = hash;
    const number = caseNumber(hash);
    const page = number >= 0 ? "case" : pages.get(hash.slice(2)) || "unknown";
    for (const section of document.querySelectorAll("section.page")) section.hidden = section.id !== page;
    article.hidden = page !== "case";
    document.querySelectorAll("header.top nav a").forEach((a) => {
      if (a.getAttribute("href") === hash) a.setAttribute("aria-current", "page");
      else a.removeAttribute("aria-current");
    });
    document.getElementById("goto").value = number >= 0 ? String(number) : "";
    if (page === "unknown") {
      const [, kind] = hash.split("/");
      document.getElementById("unknown-what").textContent = kind === "case"
        ? `No case of this report has the name ${hash.slice("#/case/".length).split("/").map(decoded).join("/")}.` : `This report has no page ${decoded(hash)}.`;
    }
    if (page === "case") await openCase(number, hash);
    if (page === "records-page") await xlafuse.records();
    if (shown !== hash) return;
    window.scrollTo(0, scrollPositions.get(hash) || 0);
    if (moved) document.getElementById("main").focus({ preventScroll: true });
  }

  async function openCase(number, hash) {
    article.replaceChildren();
    delete article.dataset.shown;
    article.setAttribute("aria-busy", "true");
    const kinds = ["case", "drawing", "sources"];
    const [data, drawing, sources] = await Promise.all(kinds.map((kind) => xlafuse.load(kind, number)));
    if (shown !== hash) return; // the address changed meanwhile
    views = { drawing, sources };
    article.innerHTML = data.html; // templates/case.html escapes all values
    document.title = article.querySelector("h1").textContent;
    const tables = slot("kernels");
    xlafuse.kernels.show(tables, drawing, { timed: "timed" in tables.dataset, priced: "priced" in tables.dataset });
    await Promise.all([xlafuse.charts(article, data.charts, xlafuse.kernels.values(data.bars, drawing), picked), openViews()]);
    article.removeAttribute("aria-busy");
    article.dataset.shown = hash;
  }

  // The data of the open case by view. A view's script and slot have its name.
  let views = {};
  const slot = (name) => article.querySelector(`[data-view="${name}"]`);
  async function showView(name, options) {
    const section = slot(name).closest("section");
    if (!xlafuse[name] || views[name] === null) {
      section.hidden = true;
      article.querySelector(`[data-jump][href="#${section.id}"]`)?.setAttribute("hidden", "");
      return false;
    }
    await xlafuse[name].show(slot(name), views[name], { ...links(), ...options });
    return true;
  }
  async function openViews() {
    for (const name of Object.keys(views)) await showView(name);
  }
  // Return handlers that lead from a kernel to its source lines and to its box.
  function links() {
    return { onKernel: picked, onBox: views.drawing && ((kernel) => showView("drawing", { kernel, focus: true })) };
  }
  // Show the source lines of a picked kernel, {implementation, index}, and focus them. Without sources, show its table row.
  async function picked(kernel) {
    await showView("drawing", { kernel });
    if (await showView("sources", { kernel, focus: true })) slot("sources").closest("section").scrollIntoView();
    else showRow(kernel);
  }
  function showRow(kernel) {
    for (const row of article.querySelectorAll("tr.picked")) row.classList.remove("picked");
    const row = xlafuse.kernels.row(slot("kernels"), kernel);
    row?.classList.add("picked");
    row?.scrollIntoView({ block: "center" });
  }
  article.addEventListener("click", (event) => {
    const jump = event.target.closest("[data-jump]");
    const kernel = event.target.closest("a.kernel");
    if (!jump && !kernel) return;
    event.preventDefault(); // keep the address of the case
    if (kernel) {
      picked({ implementation: kernel.dataset.implementation, index: Number(kernel.dataset.kernel) });
    } else {
      document.getElementById(jump.getAttribute("href").slice(1)).scrollIntoView();
    }
  });

  const select = document.getElementById("goto");
  select.addEventListener("change", () => {
    location.hash = select.value === "" ? "#/" : settings.links[Number(select.value)];
  });
  const title = document.title;
  window.addEventListener("hashchange", () => { document.title = title; route(); });
  document.addEventListener("DOMContentLoaded", async () => {
    settings = await xlafuse.load("settings");
    settings.cases.forEach((id, number) => select.append(new Option(id, String(number))));
    await route();
    document.body.dataset.ready = "true";
  });
})();
