"use strict";
// What the page knows: engines by address, each with its pools as typed arrays and its sections. Events go in, nothing else.
const STATES = [
  { id: "free", word: "free" }, { id: "request", word: "in requests" }, { id: "cached", word: "cached" },
  { id: "in_transit", word: "in transit" }, { id: "quarantined", word: "quarantined" }, { id: "padding", word: "padding" },
  { id: "retired", word: "retired" },
];
const HISTORY = 240; // points of a rate: two minutes

const bytesOf = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
const wordsOf = (text) => { const b = bytesOf(text); return new Uint32Array(b.buffer, 0, b.length >> 2); };

class Engine {
  constructor(url) {
    Object.assign(this, { url, pools: [], sections: {}, front: {}, summary: null, down: "", loading: false, unix: 0, now: 0, heard: 0, rates: [], whole: 0 });
  }
  get name() { return this.front.engine || (this.label !== this.url && this.label) || (this.kind ? `${this.kind} at ${this.url.replace(/^https?:\/\//, "")}` : this.url || "engine"); }
  get role() { return this.front.role || ""; }
  clock(time) { return time - this.now + this.unix; } // unix seconds of a time of the engine's clock
  age(seen) { return this.now + (Date.now() - this.heard) / 1000 - seen; }
  take(told) {
    if (told.kind === "down") { this.down = told.why; this.loading = told.loading; return; }
    if (told.kind === "whole") {
      if (this.front.incarnation && told.front.incarnation !== this.front.incarnation) this.rates = [];
      this.pools = []; this.sections = {}; this.whole++;
    }
    Object.assign(this, { down: "", loading: false, unix: told.unix, now: told.now, heard: Date.now(), summary: told.summary });
    for (const pool of told.pools) this.takePool(pool);
    for (const [name, value] of Object.entries(told)) {
      if (name === "front") this.front = value;
      else if (!["kind", "number", "now", "unix", "summary", "pools"].includes(name)) this.sections[name] = value;
    }
    this.rates.push({ at: told.unix, ...this.sections.rates });
    if (this.rates.length > HISTORY) this.rates.shift();
  }
  takePool(told) {
    let pool = this.pools.find((p) => p.tier === told.tier && p.part === told.part);
    const state = bytesOf(told.state), seen = wordsOf(told.seen);
    if (told.at === undefined) {
      const fresh = { tier: told.tier, part: told.part, state, seen, changed: new Float64Array(state.length), version: 1, fresh: [], hot: [], wholes: 1 };
      if (pool && pool.state.length === state.length) {
        const now = performance.now();
        for (let i = 0; i < state.length; i++) if (state[i] === pool.state[i]) fresh.changed[i] = pool.changed[i]; else { fresh.changed[i] = now; fresh.hot.push(i); }
        Object.assign(pool, fresh, { version: pool.version + 1, wholes: pool.wholes + 1 });
      } else if (pool) Object.assign(pool, fresh, { version: pool.version + 1, wholes: pool.wholes + 1 });
      else this.pools.push(fresh);
      return;
    }
    const at = wordsOf(told.at), now = performance.now();
    for (let i = 0; i < at.length; i++) {
      const page = at[i];
      if (pool.state[page] !== state[i]) { pool.changed[page] = now; pool.hot.push(page); }
      pool.fresh.push(page);
      pool.state[page] = state[i];
      if (seen.length) pool.seen[page] = seen[i];
    }
    pool.version++;
  }
}

class Model {
  constructor() { this.engines = new Map(); this.isRouter = false; this.link = "connecting"; this.members = []; this.events = 0; }
  take(url, told) {
    this.events++;
    if (told.kind === "fleet") {
      this.isRouter = true; this.members = told.members;
      for (const url of [...this.engines.keys()]) if (!told.members.some((m) => m.url === url)) this.engines.delete(url);
      for (const m of told.members) { const e = this.engine(m.url); e.label = m.name; e.kind = m.kind; e.alive = m.alive; e.why = m.why; }
      this.engines = new Map([...this.engines].sort((a, b) => (a[1].kind === b[1].kind ? a[0].localeCompare(b[0]) : a[1].kind === "prefill" ? -1 : 1)));
      return;
    }
    this.engine(url).take(told);
  }
  engine(url) {
    if (!this.engines.has(url)) this.engines.set(url, new Engine(url));
    return this.engines.get(url);
  }
}

const keyOf = () => sessionStorage.getItem("serinus-key") || "";
const headers = () => (keyOf() ? { authorization: `Bearer ${keyOf()}` } : {});

// The stream: read, parse, tell; where it ends, again after a pause.
async function follow(model, { changed, denied }) {
  for (let pause = 500; ; pause = Math.min(5000, pause * 1.6)) {
    try {
      const answer = await fetch(`${base()}dashboard/events`, { headers: headers(), cache: "no-store" });
      if (answer.status === 401) { model.link = "key"; changed(); await denied(); pause = 300; continue; }
      if (!answer.ok) throw new Error(`the server answers ${answer.status}`);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      model.link = "live"; changed();
      for (let rest = ""; ; ) {
        const { value, done } = await reader.read();
        if (done) break;
        const parts = (rest + value).split("\n\n");
        rest = parts.pop();
        for (const part of parts) {
          let url = "", data = "";
          for (const line of part.split("\n")) {
            if (line.startsWith("event: ")) url = line.slice(7);
            if (line.startsWith("data: ")) data += line.slice(6);
          }
          if (data) { model.take(url, JSON.parse(data)); pause = 500; }
        }
        changed();
      }
    } catch (error) { model.lost = String(error.message || error); }
    if (model.link !== "lost") model.lostAt = Date.now();
    model.link = "lost"; changed();
    await new Promise((go) => setTimeout(go, pause));
  }
}
const base = () => location.pathname.replace(/dashboard\/?$/, "");
async function ask(path) {
  const answer = await fetch(base() + path, { headers: headers() });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error ? said.error.message : `the server answers ${answer.status}`);
  return said;
}

// Words
const el = (tag, attributes = {}, ...children) => {
  const made = tag === "svg" || el.svg.has(tag) ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((c) => c !== null && c !== undefined));
  return made;
};
el.svg = new Set(["rect", "line", "path", "g", "circle", "title", "text"]);
const $ = (id) => document.getElementById(id);
const count = (n) => Math.round(n).toLocaleString("en");
const many = (n, one, more = `${one}s`) => `${count(n)} ${n === 1 ? one : more}`;
const span = (s) => (s < 0.001 ? "0 ms" : s < 1 ? `${(s * 1000).toFixed(s < 0.01 ? 1 : 0)} ms` : s < 10 ? `${s.toFixed(1)} s` : s < 90 ? `${Math.round(s)} s` : s < 5400 ? `${Math.round(s / 60)} min` : `${(s / 3600).toFixed(1)} h`);
const bytes = (n) => (n < 1e3 ? `${n} B` : n < 1e6 ? `${(n / 1e3).toFixed(0)} kB` : n < 1e9 ? `${(n / 1e6).toFixed(1)} MB` : `${(n / 1e9).toFixed(2)} GB`);
const hour = (unix) => new Date(unix * 1000).toLocaleTimeString("en-GB");
const short = (name) => (name.length > 24 ? `${name.slice(0, 12)}…${name.slice(-6)}` : name);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
