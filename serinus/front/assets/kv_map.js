// The KV map: every page of every pool as a cell. One image pixel a page, scaled up: 100,000 pages are one pass of a LUT.
const FLASH_MS = 900, AGES = [1, 10, 60, 600, 3600];

class PoolMap {
  constructor(engine, pool, pick) {
    this.engine = engine; this.pool = pool; this.pick = pick; this.cursor = 1; this.drawn = "";
    this.canvas = el("canvas", { tabindex: 0, role: "application", "aria-roledescription": "map of pages" });
    this.title = el("h3"); this.numbers = el("span", { class: "quiet" });
    this.box = el("figure", { class: "pool" }, el("figcaption", {}, this.title, this.numbers), this.canvas);
    this.canvas.addEventListener("click", (e) => { this.move(this.at(e)); this.open(); });
    this.canvas.addEventListener("mousemove", (e) => { this.hover = this.at(e); this.say(this.hover); });
    this.canvas.addEventListener("mouseleave", () => { this.hover = 0; $("map-say").textContent = hintOf([this.engine]); });
    this.canvas.addEventListener("keydown", (e) => this.key(e));
    this.canvas.addEventListener("focus", () => { this.drawn = ""; this.say(this.cursor); });
    this.canvas.addEventListener("blur", () => { this.drawn = ""; });
  }
  layout(width) {
    const n = this.pool.state.length - 1;
    let size = 16;
    for (; size > 2; size--) if (Math.ceil(n / Math.floor(width / size)) * size <= (n > 20000 ? 620 : n > 3000 ? 300 : 190)) break;
    if (n * 16 * 16 < width * 64) size = 16;
    const columns = Math.max(1, Math.min(n, Math.floor(width / size)));
    return { size, columns, rows: Math.max(1, Math.ceil(n / columns)) };  // files may have no page yet
  }
  at(event) {
    const r = this.canvas.getBoundingClientRect(), { size, columns } = this.shape;
    const x = Math.floor((event.clientX - r.left) / size), y = Math.floor((event.clientY - r.top) / size);
    const page = y * columns + x + 1;
    return x >= 0 && x < columns && page > 0 && page < this.pool.state.length ? page : 0;
  }
  move(page) { if (page > 0 && page < this.pool.state.length) { this.cursor = page; this.drawn = ""; this.say(page); } }
  key(e) {
    const c = this.shape.columns, last = this.pool.state.length - 1;
    const to = { ArrowRight: this.cursor + 1, ArrowLeft: this.cursor - 1, ArrowDown: this.cursor + c, ArrowUp: this.cursor - c, Home: 1, End: last, PageDown: Math.min(last, this.cursor + 10 * c), PageUp: Math.max(1, this.cursor - 10 * c) }[e.key];
    if (to !== undefined) { e.preventDefault(); this.move(to); }
    if (e.key === "Enter" || e.key === " ") { e.preventDefault(); this.open(); }
  }
  open() { if (this.cursor) this.pick(this.engine, this.pool, this.cursor); }
  describe(page) {
    const state = STATES[this.pool.state[page]], seen = this.pool.seen[page];
    const held = state.id === "cached" || state.id === "request";
    const aged = !held ? "" : seen ? `, verified ${span(Math.max(0, this.engine.age(seen)))} ago` : this.pool.seen.length ? "" : ", verified when it is read";
    return `page ${count(page)} of ${poolName(this.engine, this.pool)}: ${state.word}${aged}`;
  }
  say(page) { if (page) $("map-say").textContent = this.describe(page); }
  draw(now, byAge, palette, still) {
    const { pool } = this, width = this.box.clientWidth - 2, dpr = devicePixelRatio || 1;
    if (width < 40) return;
    const shape = this.layout(width), focused = document.activeElement === this.canvas;
    const moving = !still && pool.version !== this.version ? now + FLASH_MS : this.moving || 0;
    const tag = [width, pool.version, byAge, palette.tag, focused, this.cursor, dpr, byAge ? Math.floor(now / 1000) : 0, this.counted === pool.version].join();
    if (tag === this.drawn && now > moving) return;
    Object.assign(this, { shape, version: pool.version, moving, drawn: tag });
    const { size, columns, rows } = shape, n = pool.state.length - 1;
    if (!this.image || this.image.width !== columns || this.image.height !== rows) {
      this.image = new ImageData(columns, rows); this.pixels = new Uint32Array(this.image.data.buffer);
      this.small = new OffscreenCanvas(columns, rows);
    }
    const { pixels } = this, { lut, ages, unread, flash } = palette, { state, seen, changed } = pool;
    const clock = this.engine.now + (Date.now() - this.engine.heard) / 1000;
    const color = (page) => {
      const s = state[page];
      if (!byAge || s === 0 || s > 3) return lut[s];
      if (!seen.length || s === 3) return unread; // host memory, files, and what is under way: before it is used
      const a = clock - seen[page];
      return ages[a < 1 ? 0 : a < 10 ? 1 : a < 60 ? 2 : a < 600 ? 3 : a < 3600 ? 4 : 5];
    };
    // All pages where colours change as a whole, else those of the last deltas alone, and those that still flash.
    const painted = [columns, rows, byAge, palette.tag, pool.wholes, byAge ? Math.floor(now / 1000) : 0].join();
    if (painted !== this.painted || pool.fresh.length > n) for (let i = 0; i < n; i++) pixels[i] = color(i + 1);
    else for (const page of pool.fresh) pixels[page - 1] = color(page);
    this.painted = painted; pool.fresh = [];
    pool.hot = still || pool.hot.length > 2 * n ? [] : pool.hot.filter((page) => {
      const part = 1 - (now - changed[page]) / FLASH_MS;
      pixels[page - 1] = part > 0 ? blend(color(page), flash, part) : color(page);
      return part > 0;
    });
    this.small.getContext("2d").putImageData(this.image, 0, 0);
    const w = columns * size, h = rows * size;
    if (this.canvas.width !== Math.round(w * dpr) || this.canvas.height !== Math.round(h * dpr)) {
      this.canvas.width = Math.round(w * dpr); this.canvas.height = Math.round(h * dpr);
      this.canvas.style.width = `${w}px`; this.canvas.style.height = `${h}px`;
    }
    const g = this.canvas.getContext("2d");
    g.setTransform(dpr, 0, 0, dpr, 0, 0); g.imageSmoothingEnabled = false; g.clearRect(0, 0, w, h);
    g.drawImage(this.small, 0, 0, w, h);
    if (size >= 4) {
      g.fillStyle = palette.gap; const gap = size >= 9 ? 2 : 1;
      for (let x = 1; x <= columns; x++) g.fillRect(x * size - gap, 0, gap, h);
      for (let y = 1; y <= rows; y++) g.fillRect(0, y * size - gap, w, gap);
    }
    if (focused || this.engine.picked === `${pool.tier} ${pool.part} ${this.cursor}`) {
      const at = this.cursor - 1, gap = size >= 9 ? 2 : size >= 4 ? 1 : 0, edge = (i) => Math.max(1, i * size - 1.5);
      g.lineWidth = 2; g.strokeStyle = palette.ink;
      g.strokeRect(edge(at % columns), edge(Math.floor(at / columns)), size - gap + 3, size - gap + 3);
    }
    if (this.counted !== pool.version && now - (this.countedAt || -1e9) > 250) { this.counted = pool.version; this.countedAt = now; this.words(state, n); }
  }
  words(state, n) {
    const counts = new Uint32Array(8);
    for (let i = 1; i <= n; i++) counts[state[i]]++;
    const told = [2, 1, 3, 4, 6, 0].filter((s) => counts[s]).map((s) => `${count(counts[s])} ${STATES[s].word}`).join(", ");
    this.title.textContent = poolName(this.engine, this.pool);
    this.numbers.textContent = `${many(n, "page")}: ${told || "none"}`;
    this.canvas.setAttribute("aria-label", `${poolName(this.engine, this.pool)}, ${this.numbers.textContent}. Arrow keys move, Enter opens a page.`);
  }
}
const hintOf = (engines) => {
  const sizes = [...new Set(engines.map((e) => (e.sections.about || {}).page_size).filter(Boolean))];
  return `A cell is a page${sizes.length ? `: the KV of ${sizes.sort((a, b) => a - b).join(" or ")} tokens` : ""}. Click one to see whose it is.`;
};
const TIERS = { device: "device", host: "host memory", storage: "files" };
const poolName = (engine, pool) => `${engine.name} · ${TIERS[pool.tier] || pool.tier}${pool.tier === "storage" ? "" : ` · ${pool.part.toUpperCase()}`}`;

const packed = (color) => { const [r, g, b] = [1, 3, 5].map((i) => parseInt(color.slice(i, i + 2), 16)); return (255 << 24) | (b << 16) | (g << 8) | r; };
const blend = (a, b, t) => {
  const mix = (shift) => (((a >>> shift) & 255) * (1 - t) + ((b >>> shift) & 255) * t) << shift;
  return (255 << 24) | (mix(16) & 0xff0000) | (mix(8) & 0xff00) | (mix(0) & 255);
};
function paletteNow() {
  const lut = STATES.map((s) => packed(css(`--${s.id}`))), ages = [0, 1, 2, 3, 4, 5].map((i) => packed(css(`--age${i}`)));
  return { lut, ages, unread: packed(css("--unread")), flash: packed(css("--flash")), gap: css("--panel"), ink: css("--ink"), tag: lut.join() };
}

class KvMap {
  constructor(pick) {
    this.maps = new Map(); this.byAge = false; this.pick = pick;
    this.still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    for (const [id, byAge] of [["by-state", false], ["by-age", true]]) {
      $(id).addEventListener("click", () => {
        this.byAge = byAge;
        $("by-state").setAttribute("aria-pressed", String(!byAge)); $("by-age").setAttribute("aria-pressed", String(byAge));
        $("ages").hidden = !byAge;
      });
    }
    const words = ["< 1 s", "< 10 s", "< 1 min", "< 10 min", "< 1 h", "older"];
    const keys = [...words.map((word, i) => [`age${i}`, word]), ["unread", "when it is read"], ["free", "free"]];
    $("ages").append(...keys.map(([c, word]) => el("span", { class: "key" }, el("i", { class: `swatch ${c}` }), word)));
  }
  draw(engines, now, palette) {
    const wanted = new Set();
    for (const engine of engines) for (const pool of engine.pools) {
      const id = `${engine.url}|${pool.tier}|${pool.part}`;
      wanted.add(id);
      let map = this.maps.get(id);
      if (!map) { map = new PoolMap(engine, pool, this.pick); this.maps.set(id, map); $("pools").append(map.box); }
      if (map.pool !== pool) Object.assign(map, { pool, drawn: "", painted: "", counted: 0 });  // versions begin anew
      map.engine = engine;
      map.draw(now, this.byAge, palette, this.still);
    }
    $("pools-none").hidden = wanted.size > 0;
    if (wanted.size && !$("map-say").textContent) $("map-say").textContent = hintOf(engines);
    for (const [id, map] of this.maps) if (!wanted.has(id)) { map.box.remove(); this.maps.delete(id); }
  }
}
