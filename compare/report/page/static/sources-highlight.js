// Syntax highlighting in the browser: markup for every token would take more bytes than the text itself.
xlafuse.highlighter = (() => {
  "use strict";
  function span(kind, text) {
    const node = document.createElement("span");
    node.className = `so-${kind}`;
    node.textContent = text;
    return node;
  }

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

  return highlighter;
})();
