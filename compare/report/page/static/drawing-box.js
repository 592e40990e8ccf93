// The box of a kernel, or of several folded kernels.
Object.assign(xlafuse.drawn, (() => {
  "use strict";
  const { breakable, button, make } = xlafuse;
  const { kindOf, hide, tip, pin } = xlafuse.drawn;

  function box(state, column, unit, at) {
    const { kernel, fold } = unit;
    const node = button("dr-box", undefined, () => (fold ? unfold(state, column, unit) : pin(state, column, unit)), { tabindex: "-1" });
    node.dataset.column = column.c;
    node.dataset.key = `${column.c}.${fold ? `f${unit.f}` : unit.order}`;
    unit.own = node;
    const head = make("span", "dr-title");
    if (fold) {
      node.classList.add("dr-fold");
      head.append(make("b", "", `${fold.members.length} more`), make("small", "", fold.text));
      node.title = "Show these kernels";
    } else {
      node.style.setProperty("--dr-kind", `var(--kind-${kindOf(kernel)})`);
      node.setAttribute("aria-label", [`${unit.order + 1}`, kernel.name, kernel.kind, kernel.time, kernel.bytes]
        .filter(Boolean).join(", "));
      const cost = [kernel.time, kernel.bytes].filter(Boolean).join(" · ");
      const name = make("b");
      name.append(make("i", "", unit.order + 1), " ");
      breakable(name, kernel.name);
      head.append(name);
      if (unit.first === false) {
        node.classList.add("dr-again");
        head.append(make("small", "", "same kernel, continued"));
      } else {
        head.append(make("small", "", cost));
        const bar = make("span", "dr-time");
        bar.style.width = `${(100 * (kernel.us || 0)) / state.longest}%`;
        head.append(bar);
      }
      node.addEventListener("pointerenter", (event) => event.pointerType === "mouse" && !state.pinned && tip(state, column, unit));
      node.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && !state.pinned && hide(state));
      node.addEventListener("focus", () => !state.pinned && !state.quiet && node.matches(":focus-visible") && tip(state, column, unit));
      node.addEventListener("blur", () => state.pinned || hide(state));
    }
    node.append(head);
    if (kernel && unit.piece) {
      for (let band = unit.piece[1]; band <= unit.piece[2]; band++) {
        const words = kernel.ops[band] && breakable(make("span", "dr-ops"), kernel.ops[band]);
        const gap = !(band in kernel.ops) && band > unit.piece[1] && band < unit.piece[2];
        if (gap) within(make("span", "dr-gap", "", { title: "the kernel computes nothing of this stage" }), unit, band, at, node);
        else if (words && band === unit.piece[1]) head.append(words);
        else if (words) within(words, unit, band, at, node);
      }
    } else if (kernel?.ops[""]) head.append(breakable(make("span", "dr-ops"), kernel.ops[""]));
    if (unit.piece) head.style.gridRow = `1 / ${Math.min(unit.bottom, at.starts[unit.piece[1]] + at.slots[unit.piece[1]]) - unit.top + 1}`;
    for (const member of unit.members) {
      const known = state.boxes.get(`${column.c}.${member}`);
      if (known) known.all.push(unit);
      else state.boxes.set(`${column.c}.${member}`, { node, unit, all: [unit] });
    }
    return node;
  }

  function unfold(state, column, { fold, f }) {
    state.unfolded.add(`${column.c}.${f}`);
    state.redraw();
    state.boxes.get(`${column.c}.${fold.members[0]}`)?.node.focus();
  }

  function within(child, unit, band, at, node) {
    const top = Math.max(unit.top, at.starts[band]), bottom = Math.min(unit.bottom, at.starts[band] + at.slots[band]);
    child.style.gridRow = `${top - unit.top + 1} / ${bottom - unit.top + 1}`;
    node.append(child);
  }

  return { box };
})());
