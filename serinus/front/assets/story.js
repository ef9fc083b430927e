// Incidents: what the canaries of all engines say of one request or page, as one story in the order of events.
const NEWS_S = 300; // so long an incident stands in the headline

function storiesOf(engines) {
  const views = engines.filter((e) => e.sections.incidents && e.sections.incidents.incidents).map((e) => ({ engine: e, ...e.sections.incidents }));
  const names = new Map();
  for (const v of views) {
    for (const t of v.told) names.set(t.xid, t.rid);
    for (const i of v.incidents) { if (i.client) names.set(i.rid, i.client); if (i.handoff) names.set(i.handoff.xid, i.handoff.rid); }
  }
  const stories = new Map(), called = (rid) => names.get(rid) || rid;
  for (const v of views) for (const i of v.incidents) {
    const rid = called(i.rid) || (i.handoff ? i.handoff.rid : ""), id = rid || `${v.engine.url} ${i.part} ${i.page}`;
    const story = stories.get(id) || { id, rid, incidents: [], told: [], injected: [], healed: null, at: 0, first: Infinity };
    story.incidents.push({ ...i, engine: v.engine }); story.at = Math.max(story.at, i.last_time); story.first = Math.min(story.first, i.first_time);
    stories.set(id, story);
  }
  for (const v of views) {
    for (const t of v.told) { const s = stories.get(called(t.xid)) || stories.get(t.rid); if (s) s.told.push({ ...t, engine: v.engine }); }
    for (const f of v.injected) {
      const s = (f.rid && stories.get(called(f.rid))) || [...stories.values()].find((s) => s.incidents.some((i) => i.engine === v.engine && i.slot === f.slot));
      if (s) s.injected.push({ ...f, engine: v.engine });
    }
  }
  const requests = engines.flatMap((e) => [...(e.sections.ended || []), ...(e.sections.requests || [])]);
  for (const s of stories.values()) s.healed = requests.find((r) => r.heals > 0 && (r.rid === s.rid || r.client === s.rid));
  return [...stories.values()].sort((a, b) => b.at - a.at);
}

const wordsOfReason = (reasons) => reasons.map((r) => ({ verify_real_kv_hash: "bytes of KV differ from their stamp", verify_chain_hash: "KV of another sequence", verify_position: "KV of another position", verify_token: "KV of another token", write_token: "a wrong token was written", write_position: "a wrong position was written" })[r] || r).join(", ");

class Incidents {
  constructor(root, pick) { this.root = root; this.pick = pick; this.say = el("p", { class: "quiet" }); this.list = el("div", { class: "stories" }); root.append(el("div", { class: "tools" }, this.say), this.list); }
  draw(engines) {
    const stories = storiesOf(engines), on = engines.filter((e) => (e.sections.health || {}).mode && e.sections.health.mode !== "none");
    const tag = JSON.stringify([stories.map((s) => [s.id, s.at, s.incidents.length, s.incidents.map((i) => i.count), s.told.length, s.injected.length, s.healed && s.healed.phase]), on.map((e) => e.name), engines.length]);
    if (tag === this.tag) return;
    this.tag = tag;
    const passes = on.map((e) => e.sections.health.sweep_passes).reduce((a, b) => a + b, 0);
    this.say.textContent = on.length ? `${many(stories.length, "story", "stories")} from ${many(on.length, "engine")}; mode ${[...new Set(on.map((e) => e.sections.health.mode))].join(", ")}, ${many(passes, "sweep")} over the cache` : "No engine has a canary (--kv-canary none).";
    this.list.replaceChildren(...stories.map((s) => this.story(s)));
    if (!stories.length && on.length) this.list.append(el("div", { class: "calm" }, el("strong", {}, "Nothing was found wrong."), el("p", {}, "Each incident will stand here as one story: what was found where, how the page was filled, who was told, and what came of it.")));
  }
  story(s) {
    const first = s.incidents.reduce((a, b) => (b.first_time < a.first_time ? b : a)), steps = [];
    for (const f of s.injected.slice(0, 4)) steps.push([0, "planted", f.engine.name, `${f.mode} was planted on purpose, slot ${f.slot}, position ${f.position}`, null]);
    for (const i of s.incidents.slice(0, 6)) {
      const page = el("button", { type: "button", class: "link-button", on: { click: () => this.pick(i.engine, { tier: "device", part: i.part.toLowerCase() }, i.page) } }, `page ${i.page}`);
      steps.push([i.first_time, "found", i.engine.name, el("span", {}, `${i.reasons.join(", ")}, found by ${i.tags.join(", ")} in step ${i.first_step}${i.count > 1 ? ` and ${many(i.count - 1, "time")} more` : ""}: `, page, `, slot ${i.slot}, position ${i.position}; owner ${i.owner}${i.rank ? `, rank ${i.rank}` : ""}`), i]);
      if (i.handoff) steps.push([i.first_time, "came", i.engine.name, `the page was ${i.handoff.from ? `filled by ${i.handoff.from}` : `sent to ${i.handoff.to}`}, handoff ${short(i.handoff.xid)}${i.handoff.pieces ? `, ${i.handoff.pieces}` : ""}`, null]);
    }
    for (const t of s.told.slice(0, 4)) steps.push([s.first + 0.001, "told", t.engine.name, `was told by ${t.by}: ${t.reason}`, null]);
    const mode = first.engine.sections.health ? first.engine.sections.health.mode : "";
    if (s.healed) {
      const from = Object.entries(s.healed.repaired || {}).filter(([, n]) => n).map(([k, n]) => k === "computed" ? `${count(n)} computed` : `${count(n)} from ${k}`).join(", ");
      steps.push([s.at + 0.002, "healed", first.engine.name, `the page was quarantined; ${short(s.healed.client)} went back to its last verified token and ${s.healed.ended ? `was computed again${from ? ` (tokens: ${from})` : ""}: the right answer left` : "is computed again"}`, null]);
    } else steps.push([s.at + 0.002, mode === "log" ? "logged" : "quarantined", first.engine.name, mode === "log" ? "only logged (--kv-canary log): the request goes on with it" : mode === "raise" ? "the page is quarantined; requests that used it end with a 500 that names it" : mode === "heal" ? "the page is quarantined: no request reads it again; those that did go back to their last verified token" : "the page is quarantined: no request reads it again", null]);
    const outcome = s.healed ? "healed" : mode === "log" ? "logged only" : "quarantined";
    return el("article", { class: `story ${s.healed ? "ok" : mode === "log" ? "bad" : "held"}` },
      el("header", {}, el("span", { class: "sign", "aria-hidden": "true" }), el("h3", { class: "title" }, wordsOfReason(first.reasons)), el("span", { class: "tag" }, outcome), el("span", { class: "spacer" }), el("time", {}, hour(s.first))),
      el("p", { class: "quiet" }, `${s.rid ? `Request ${short(s.rid)} · ` : ""}${[...new Set(s.incidents.map((i) => i.engine.name))].join(", ")} · ${first.part}`),
      el("ol", {}, ...steps.map(([, kind, who, what]) => el("li", { class: kind }, el("b", {}, kind), el("span", { class: "by" }, who), el("span", {}, what)))),
      el("details", {}, el("summary", {}, "Evidence"), el("pre", {}, s.incidents.slice(0, 4).map((i) => `${i.reasons.join("|")} ${i.tags.join(",")} slot ${i.slot} position ${i.position}\n  token ${i.stored_token}, expected ${i.expected_token}\n  chain ${i.stored_hash}, expected ${i.expected_hash}\n  digest stored ${i.stored_digest}, found ${i.found_digest}\n  ${i.history}`).join("\n"))));
  }
}
