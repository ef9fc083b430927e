// The prefix tree as an icicle: x = position in the sequence, so that width is tokens; a node's children stand to its right.
class TreeView {
  constructor(pick) {
    this.pick = pick; this.views = new Map(); this.chosen = null;
    $("tree-legend").append(...[["tier-device", "device"], ["tier-both", "device and host"], ["tier-host", "host alone"]].map(([c, word]) => el("span", { class: "key" }, el("i", { class: `swatch ${c}` }), word)), el("span", { class: "key" }, "paler = longer unused, outlined = pinned"));
  }
  async load(model) {
    const said = await ask("cache?limit=2000");
    const members = said.engines || [{ url: "", cache: said }];
    for (const m of members) if (m.cache) this.views.set(m.url, m.cache);
    for (const url of this.views.keys()) if (!members.some((m) => m.url === url)) this.views.delete(url);
  }
  draw(engines) {
    const box = $("trees"), kept = document.activeElement && document.activeElement.dataset ? document.activeElement.dataset.node : null;
    box.replaceChildren();
    for (const engine of engines) {
      const view = this.views.get(engine.url);
      if (!view) continue;
      const tree = view.tree, head = el("h3", {}, `${engine.name}`);
      const shown = tree.nodes.length < tree.total ? `, ${count(tree.nodes.length)} shown` : "";
      const words = el("span", { class: "quiet" }, tree.total > 0 ? `${many(tree.nodes.length ? tree.total : 0, "node")}${shown}` : "nothing is cached yet");
      box.append(el("figure", { class: "pool" }, el("figcaption", {}, head, words), tree.nodes.length ? this.icicle(engine, view) : ""));
    }
    if (kept) { const again = box.querySelector(`[data-node="${kept}"]`); if (again) again.focus({ preventScroll: true }); }
    if (!box.children.length) box.append(el("p", { class: "empty" }, "No tree has been read yet."));
  }
  icicle(engine, view) {
    const nodes = view.tree.nodes.map((n) => ({ ...n, children: [] })), roots = [], stack = [];
    for (const n of nodes) {
      stack.length = n.depth;
      const parent = stack[n.depth - 1];
      (parent && parent.namespace === n.namespace ? parent.children : roots).push(n);
      n.parent = parent; stack[n.depth] = n;
    }
    let rows = 0;
    const place = (n) => {
      n.top = rows;
      if (!n.children.length) rows++;
      for (const c of n.children) place(c);
      n.rows = rows - n.top;
    };
    roots.forEach(place);
    const end = Math.max(...nodes.map((n) => n.end)), width = Math.max(300, $("trees").clientWidth - 4);
    const height = rows > 120 ? 4 : rows > 50 ? 9 : rows > 20 ? 16 : 26, x = (t) => (t / end) * width;
    const oldest = Math.max(1, ...nodes.map((n) => n.idle));
    const svg = el("svg", { class: "icicle", viewBox: `0 0 ${width} ${rows * height}`, width, height: rows * height, role: "tree", "aria-label": `Prefix tree of ${engine.name}: ${many(nodes.length, "node")}, up to ${count(end)} tokens deep. Arrow keys move, Enter opens.` });
    nodes.forEach((n, i) => {
      const w = Math.max(1.5, x(n.end) - x(n.start) - 1), h = n.rows * height - 1, host = n.pages.host > 0, device = n.pages.device > 0;
      const tier = host && device ? "both" : host ? "host" : "device", tokens = n.end - n.start;
      const strength = 0.38 + 0.62 * (1 - Math.sqrt(n.idle / oldest));
      const words = `${many(tokens, "token")} from position ${n.start}, ${tier === "both" ? "device and host" : tier}, ${many(n.hits, "hit")}${n.pins ? `, pinned ${n.pins}` : ""}`;
      const open = () => { this.pick(engine, n); };
      const cell = el("g", { class: `node tier-${tier}${n.pins ? " pinned" : ""}${strength < 0.7 ? " pale" : ""}`, role: "treeitem", "aria-level": n.depth + 1, "aria-label": words, tabindex: i ? -1 : 0, "data-node": `${engine.url} ${n.id}`, on: { click: open, focus: () => { $("tree-say").textContent = words; }, keydown: (e) => this.key(e, n, engine, open) } },
        el("rect", { x: x(n.start), y: n.top * height, width: w, height: Math.max(1, h), rx: Math.min(3, h / 4), "fill-opacity": strength.toFixed(2) }), el("title", {}, words));
      if (w > 64 && h > 13) cell.append(el("text", { x: x(n.start) + 7, y: n.top * height + Math.min(h / 2, 60) + 4 }, w > 130 ? `${count(tokens)} tokens${n.hits ? `, ${many(n.hits, "hit")}` : ""}` : count(tokens)));
      n.cell = cell; svg.append(cell);
    });
    return svg;
  }
  key(e, n, engine, open) {
    const among = n.parent ? n.parent.children : null, at = among ? among.indexOf(n) : 0;
    const to = { ArrowRight: n.children[0], ArrowLeft: n.parent, ArrowDown: among ? among[at + 1] : null, ArrowUp: among ? among[at - 1] : null }[e.key];
    if (to) { e.preventDefault(); n.cell.setAttribute("tabindex", -1); to.cell.setAttribute("tabindex", 0); to.cell.focus(); }
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); open(); }
  }
}
