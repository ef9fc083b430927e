// Requests as a waterfall over time, handoffs as swim lanes: the prefill engine's pieces above, the decode engine's below.
const WINDOW_S = 60;
// Codes of handoffs that did what was asked of them: "kept" is computed by decode after all.
const isBad = (code) => !["landed", "drained", "kept"].includes(code);

function requestsOf(engines) {
  const rows = [];
  for (const engine of engines) {
    for (const r of [...(engine.sections.ended || []), ...(engine.sections.requests || [])]) {
      const t = (time) => (time === null || time === undefined ? null : engine.clock(time));
      rows.push({ ...r, by: engine, arrival: t(r.arrival), started: t(r.started), first: t(r.first_token), ended: r.ended ? t(r.ended) : null });
    }
  }
  const guests = rows.filter((r) => r.client !== r.rid), own = rows.filter((r) => r.client === r.rid);
  for (const r of own) r.guest = guests.find((g) => g.client === r.rid);
  return [...own, ...guests.filter((g) => !own.some((r) => r.rid === g.client))].sort((a, b) => b.arrival - a.arrival);
}

function phasesOf(r, until) {
  const end = r.ended || until, first = r.first || end, started = r.started || Math.min(first, end), parts = [];
  const remote = r.engine || r.phase === "transfer" || r.phase === "prealloc";
  parts.push(["queue", r.arrival, started]);
  if (r.guest && r.guest.started && remote) {
    parts.push(["wait", started, Math.max(started, Math.min(first, r.guest.started))]);
    parts.push(["remote", Math.max(started, r.guest.started), first]);
  } else parts.push([remote ? "remote" : "prefill", started, first]);
  if (r.first) parts.push(["decode", first, end]);
  return parts.filter(([, a, b]) => b > a);
}
const ALONE = { short: "little to prefill", sooner_here: "sooner here", no_prefill_engine: "no prefill engine", peer_gone: "prefill engine lost", peer_slow: "prefill engine late", kv_canary: "KV found wrong" };
const STEPS = { prealloc: "waiting", transfer: "prefill and handoff", inflight: "handoff" };
const PHASES = { queue: "queue", wait: "asked", prefill: "prefill", remote: "prefill and handoff", decode: "decode" };

class Requests {
  constructor(root) {
    this.rows = el("tbody");
    this.axis = el("div", { class: "axis", "aria-hidden": "true" });
    const keys = Object.entries(PHASES).filter(([p]) => p !== "wait").map(([p, word]) => el("span", { class: "key" }, el("i", { class: `swatch p-${p}` }), word));
    this.say = el("span", { class: "quiet" });
    root.append(el("div", { class: "tools" }, el("span", { class: "legend" }, ...keys, el("span", { class: "key" }, el("b", { class: "heal" }, "◆"), "healed")), el("span", { class: "spacer" }), this.say),
      el("table", { class: "rows" }, el("thead", {}, el("tr", {}, ...["Request", "Engine", "Prompt + answer", "First token", "State"].map((h) => el("th", { scope: "col" }, h)), el("th", { scope: "col", class: "wide" }, this.axis))), this.rows));
  }
  draw(engines) {
    const all = requestsOf(engines), until = Math.max(0, ...engines.map((e) => e.clock(e.now) + (Date.now() - e.heard) / 1000 * !e.down));
    const recent = all.filter((r) => !r.ended || r.ended > until - WINDOW_S).slice(0, 40), rows = recent.length ? recent : all.slice(0, 12);
    const end = recent.length ? until : Math.max(0, ...rows.map((r) => r.ended || 0)) || until;
    const begin = Math.max(end - WINDOW_S, Math.min(end - 2, ...rows.map((r) => r.arrival))), wide = end - begin;
    this.axis.replaceChildren(...[0, 0.25, 0.5, 0.75, 1].map((p) => { const tick = el("span", {}, p === 1 ? (recent.length ? "now" : hour(end)) : `−${span((1 - p) * wide)}`); tick.style.left = `${p * 100}%`; return tick; }));
    const live = all.filter((r) => !r.ended).length;
    this.say.textContent = `${many(live, "request")} open, the last ${rows.length} shown`;
    this.rows.replaceChildren(...rows.map((r) => {
      const chart = el("div", { class: "track" });
      for (const [phase, a, b] of phasesOf(r, end)) {
        const part = el("i", { class: `p-${phase}`, title: `${PHASES[phase]}: ${span(b - a)}` });
        part.style.left = `${Math.max(0, (a - begin) / wide) * 100}%`; part.style.width = `${Math.max(0.15, ((Math.max(b, begin) - Math.max(a, begin)) / wide) * 100)}%`;
        chart.append(part);
      }
      const words = phasesOf(r, end).map(([p, a, b]) => `${PHASES[p]} ${span(b - a)}`).join(", ");
      const state = r.error ? "failed" : r.ended ? (r.finish === "length" || r.finish === "stop" || !r.finish ? "done" : r.finish) : STEPS[r.phase] || r.phase;
      const why = r.local_reason ? ALONE[r.local_reason] || r.local_reason.replaceAll("_", " ") : "";
      const where = r.engine ? [`${r.engine} → ${r.by.name}`] : [r.by.name, why ? el("span", { class: "quiet", title: `${r.by.name} computed the prompt itself (local_reason: ${r.local_reason})` }, ` · ${why}`) : ""];
      return el("tr", { class: r.error ? "bad" : "" }, el("th", { scope: "row", title: r.rid }, short(r.client)), el("td", {}, ...where), el("td", { class: "num" }, `${count(r.prompt)}${r.cached ? ` (${count(r.cached)} cached)` : ""} + ${count(r.generated)}`), el("td", { class: "num" }, r.first ? span(r.first - r.arrival) : "–"), el("td", { class: `state ${state}`, title: r.error || "" }, state, r.heals ? el("b", { class: "heal", title: `healed ${r.heals} times` }, ` ◆${r.heals > 1 ? r.heals : ""}`) : ""), el("td", { class: "wide" }, chart, el("span", { class: "sr" }, words)));
    }));
    if (!rows.length) this.rows.append(el("tr", {}, el("td", { colspan: 6, class: "empty" }, "No request has come since this page was opened.")));
  }
}

function handoffsOf(engines) {
  const found = new Map();
  for (const engine of engines) for (const h of engine.sections.handoffs || []) {
    const t = (time) => (time === null || time === undefined ? null : engine.clock(time));
    const side = { ...h, by: engine, began: t(h.began), granted: t(h.granted), ended: t(h.ended), pieces: h.pieces.map(([at, ...rest]) => [t(at), ...rest]) };
    const one = found.get(h.xid) || { xid: h.xid, rid: h.rid };
    one[engine.role === "prefill" ? "prefill" : "decode"] = side;
    found.set(h.xid, one);
  }
  const began = (h) => (h.decode || h.prefill).began;
  return [...found.values()].sort((a, b) => began(b) - began(a));
}

class Handoffs {
  constructor(root) {
    this.list = el("div", { class: "lanes" }); this.say = el("span", { class: "quiet" });
    const keys = [["grant", "pages granted"], ["piece-sent", "piece sent"], ["piece-taken", "piece landed and verified"]].map(([c, word]) => el("span", { class: "key" }, el("i", { class: `swatch ${c}` }), word));
    root.append(el("div", { class: "tools" }, el("span", { class: "legend" }, ...keys), el("span", { class: "spacer" }), this.say), this.list);
  }
  draw(engines) {
    const all = handoffsOf(engines).slice(0, 16), tag = JSON.stringify(all.map((h) => [h.xid, ...[h.decode, h.prefill].map((s) => s && [s.pieces.length, s.ended])])) + this.list.clientWidth;
    const failed = all.filter((h) => this.code(h) === "failed").length;
    this.say.textContent = all.length ? `the last ${many(all.length, "handoff")}${failed ? `, ${failed} failed` : ""}; all begin at the left` : "";
    if (tag === this.tag && !all.some((h) => !(h.decode || h.prefill).ended)) return;
    this.tag = tag;
    const times = all.flatMap((h) => [h.decode, h.prefill].filter(Boolean).map((s) => (s.ended || s.by.clock(s.by.now)) - Math.min(...[h.decode, h.prefill].filter(Boolean).map((o) => o.began))));
    const longest = Math.max(0.02, ...times), width = Math.max(260, this.list.clientWidth - 356);
    const axis = el("div", { class: "axis", "aria-hidden": "true" }, ...[0, 0.25, 0.5, 0.75, 1].map((p) => { const tick = el("span", {}, p ? `+${span(p * longest)}` : "0"); tick.style.left = `${p * 100}%`; return tick; }));
    this.list.replaceChildren(...(all.length ? [el("div", { class: "handoff head" }, el("span"), el("span"), axis)] : []), ...all.map((h) => this.lane(h, longest, width)));
    if (!all.length) this.list.append(el("p", { class: "empty" }, "No handoff since this page was opened. Engines that prefill and decode by themselves have none."));
  }
  code(h) {
    const codes = [h.decode, h.prefill].filter((s) => s && s.ended).map((s) => s.code);
    return codes.some(isBad) ? "failed" : codes.length ? "landed" : "open";
  }
  lane(h, longest, width) {
    const sides = [h.prefill, h.decode], there = sides.filter(Boolean), zero = Math.min(...there.map((s) => s.began)), x = (t) => ((t - zero) / longest) * (width - 8) + 4;
    const code = this.code(h), bad = there.find((s) => s.ended && isBad(s.code)), main = h.decode || h.prefill;
    const names = [h.prefill ? h.prefill.by.name : (h.decode && h.decode.engine) || "prefill", h.decode ? h.decode.by.name : (h.prefill && h.prefill.engine) || "decode"];
    const took = span(Math.max(...there.map((s) => (s.ended || s.by.clock(s.by.now)) - zero)));
    const words = `${code === "failed" ? `failed: ${bad.code}` : code}, ${many(main.pages, "page")}, ${bytes(main.bytes)} in ${many(main.pieces.length, "piece")}, ${took}`;
    const svg = el("svg", { class: "lane", width, height: 48, viewBox: `0 0 ${width} 48`, role: "img", "aria-label": `Handoff of ${h.rid} from ${names[0]} to ${names[1]}: ${words}` });
    sides.forEach((side, i) => {
      const y = i ? 32 : 12;
      svg.append(el("line", { x1: 0, x2: width, y1: y, y2: y, class: "rail" }));
      if (!side) return;
      const end = side.ended || side.by.clock(side.by.now);
      svg.append(el("rect", { x: x(side.granted || side.began), y: y - 5, width: Math.max(2, x(end) - x(side.granted || side.began)), height: 10, rx: 3, class: "span" }));
      if (side.granted && side.granted > side.began) svg.append(el("line", { x1: x(side.began), x2: x(side.granted), y1: y, y2: y, class: "asked" }));
    });
    if (h.prefill && h.decode) for (const [at, rank, number] of h.decode.pieces) {
      const sent = h.prefill.pieces.find(([, r, n]) => r === rank && n === number);
      if (sent) svg.append(el("line", { x1: x(sent[0]), y1: 17, x2: x(at), y2: 27, class: "flow" }));
    }
    sides.forEach((side, i) => {
      if (!side) return;
      for (const [at, rank, number, size] of side.pieces) svg.append(el("rect", { x: x(at) - 3, y: (i ? 32 : 12) - 6, width: 6, height: 12, rx: 1.5, class: i ? "piece-taken" : "piece-sent" }, el("title", {}, `piece ${number} of rank ${rank}: ${bytes(size)}, ${span(at - zero)} after the beginning`)));
      if (side.ended && isBad(side.code)) { const at = x(side.ended), y = i ? 32 : 12; svg.append(el("path", { d: `M${at - 6} ${y - 6}L${at + 6} ${y + 6}M${at - 6} ${y + 6}L${at + 6} ${y - 6}`, class: "cross" })); }
    });
    return el("article", { class: `handoff ${code}` }, el("div", { class: "who" }, el("strong", { title: h.rid }, short(h.rid)), el("span", { class: "quiet" }, `${hour(zero)} · ${words}`), bad && bad.reason ? el("span", { class: "why" }, bad.reason) : ""), el("div", { class: "ends" }, el("span", {}, names[0]), el("span", {}, names[1])), svg);
  }
}
