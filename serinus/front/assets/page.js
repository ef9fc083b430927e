// The page: headline, tabs, details and the loop that draws. Everything that is shown comes from the model.
(() => {
  const model = new Model(), TABS = [["map", "KV map"], ["tree", "Prefix tree"], ["requests", "Requests"], ["handoffs", "Handoffs"], ["incidents", "Incidents"]];
  let chosen = "", tab = (location.hash.match(/tab=(\w+)/) || [])[1] || "map", paused = false, dirty = true, palette = null, theme = "", detail = null;
  if (!TABS.some(([id]) => id === tab)) tab = "map";
  const given = location.hash.match(/key=([^&]+)/);
  if (given) { sessionStorage.setItem("serinus-key", decodeURIComponent(given[1])); history.replaceState(null, "", location.pathname); }

  const shown = () => [...model.engines.values()].filter((e) => !chosen || e.url === chosen);
  const map = new KvMap(openPage), tree = new TreeView(openNode), rates = new Rates($("rates"));
  const requests = new Requests($("pane-requests")), handoffs = new Handoffs($("pane-handoffs")), incidents = new Incidents($("pane-incidents"), openPage);

  // Tabs
  for (const [id, word] of TABS) {
    $("tabs").append(el("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `pane-${id}`, on: { click: () => show(id), keydown: (e) => {
      const at = TABS.findIndex(([t]) => t === id), to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: TABS.length - 1 }[e.key];
      if (to !== undefined) { e.preventDefault(); show(TABS[(to + TABS.length) % TABS.length][0]); $(`tab-${tab}`).focus(); }
    } } }, word, el("span", { class: "badge" })));
  }
  function show(id) {
    tab = id; dirty = true;
    for (const [t] of TABS) { $(`tab-${t}`).setAttribute("aria-selected", String(t === id)); $(`tab-${t}`).tabIndex = t === id ? 0 : -1; $(`pane-${t}`).hidden = t !== id; }
    if (id === "tree") loadTree();
  }
  async function loadTree() {
    if (tab !== "tree" || model.link !== "live") return;
    try { await tree.load(model); tree.draw(shown()); } catch (error) { $("tree-say").textContent = String(error.message); }
  }
  setInterval(() => { if (!paused && !document.hidden) loadTree(); }, 2000);

  // Engines
  let pillsTag = "";
  function pills() {
    const engines = [...model.engines.values()], tag = JSON.stringify([chosen, engines.map((e) => [e.url, e.name, e.role, !!e.down, e.loading])]);
    if (tag === pillsTag) return;
    pillsTag = tag;
    const had = document.activeElement && document.activeElement.dataset.engine;
    const pill = (url, word, role, down, loading) => el("button", { type: "button", "data-engine": url || "all", "aria-pressed": String(chosen === url), class: loading ? "loading" : down ? "down" : "", title: down || "", on: { click: () => { chosen = url; dirty = true; tree.draw(shown()); pills(); } } }, el("i", { "aria-hidden": "true" }), word, role ? el("small", {}, role) : "", down ? el("span", { class: "sr" }, loading ? " is starting" : " is gone") : "");
    $("engines").replaceChildren(...(engines.length > 1 ? [pill("", "All engines", "", "")] : []), ...engines.map((e) => pill(engines.length > 1 ? e.url : "", e.name, e.name.startsWith(e.role) ? "" : e.role, e.down, e.loading)));
    if (had !== undefined) { const again = $("engines").querySelector(`[data-engine="${had}"]`); if (again) again.focus(); }
    const first = engines.find((e) => e.front.model);
    if (first) { const name = first.front.model.replace(/\/+$/, "").split("/").slice(-1)[0]; $("model").textContent = `${name}${first.front.info && first.front.info.dtype ? ` · ${first.front.info.dtype}` : ""}`; document.title = `Serinus · ${name}`; }
  }

  // Headline
  function sentence(engines) {
    const told = engines.filter((e) => e.summary), gone = engines.filter((e) => e.down), totals = {};
    let slots = 0, oldest = null;
    for (const e of told) {
      slots += e.summary.slots;
      if (e.summary.oldest_s !== null) oldest = Math.max(oldest || 0, e.summary.oldest_s + (model.link === "live" && !e.down ? 0 : (Date.now() - e.heard) / 1000));
      for (const [state, n] of Object.entries(e.summary.pages)) totals[state] = (totals[state] || 0) + n;
    }
    const modes = told.map((e) => (e.sections.health || {}).mode), stories = storiesOf(engines), now = Date.now() / 1000, fresh = stories.filter((s) => now - s.at < NEWS_S);
    const degraded = told.map((e) => (e.sections.health || {}).degraded).find(Boolean);
    if (model.link === "key") return ["wait", "Locked", "This dashboard asks for the admin key.", totals];
    const named = gone.map((e) => e.name).join(", "), starting = gone.length > 0 && gone.every((e) => e.loading), all = gone.length > 1;
    const loads = `${all ? "They load" : "It loads"} weights and kernels. A machine's first start compiles kernels, which may take a minute.`;
    if (!told.length && starting) return ["wait", all ? `${count(gone.length)} engines are starting` : "The engine is starting", loads, totals];
    if (!told.length) return ["wait", gone.length ? "No engine answers" : "Waiting for the engine", gone.length ? gone[0].down : model.lost && model.link !== "live" ? model.lost : "", totals];
    const quiet = Math.max(...told.map((e) => (Date.now() - e.heard) / 1000));
    if (model.link !== "live") return ["lost", "No news", `The connection is lost; this is how it stood ${span(Math.min(...told.map((e) => (Date.now() - e.heard) / 1000)))} ago. It is tried again.`, totals];
    const silent = !gone.length ? "" : starting ? ` Starting: ${named}.` : ` No news of ${named}.`;
    if (fresh.length) {
      const s = fresh[0], i = s.incidents[0], bad = s.healed ? (s.healed.ended ? "healed: the right answer left" : "its request is computed again") : modes.includes("log") ? "logged only" : "quarantined";
      return ["bad", `KV incident: ${wordsOfReason(i.reasons)}`, `${i.engine.name}, page ${i.page} (${i.part}), position ${i.position}, ${span(Math.max(0, now - s.at))} ago; ${bad}${fresh.length > 1 ? `; ${many(fresh.length, "story", "stories")} in the last 5 minutes` : ""}.${silent}`, totals];
    }
    if (degraded) return ["bad", "An engine is degraded", degraded, totals];
    if (gone.length) return starting ? ["lost", `${named} ${all ? "are" : "is"} starting`, loads, totals] : ["lost", `No news of ${named}`, gone[0].down, totals];
    if (modes.every((m) => m === "none" || !m)) return ["wait", "KV is not checked", "These engines run without a canary (--kv-canary none).", totals];
    const before = stories.length ? ` ${many(stories.length, "earlier incident")}, none in the last 5 minutes.` : "";
    const some = modes.some((m) => m === "none") ? " Some engines have no canary." : "";
    const late = quiet > 5 ? ` Last news ${span(quiet)} ago: a long step.` : "";
    if (!slots) return ["ok", "KV sound: nothing is cached yet", `${many(told.length, "engine")} watched by the canary.${before}${some}${late}`, totals];
    return ["ok", `KV sound: ${many(slots, "slot")} verified, oldest ${span(oldest)} ago`, `Every slot (the KV of one token) on the device was verified when it was cached, or later.${before}${some}${late}`, totals];
  }
  let said = "", barTag = "";
  function headline(engines) {
    const [kind, words, more, totals] = sentence(engines);
    $("headline").className = `headline ${kind}`;
    if (words !== said && (kind !== "ok" || !said.startsWith("KV sound") || Date.now() - headline.at > 900)) { said = words; headline.at = Date.now(); $("words").textContent = words; }
    if ($("words-more").textContent !== more) $("words-more").textContent = more;
    const order = ["cached", "request", "in_transit", "quarantined", "retired", "free"], all = order.reduce((n, s) => n + (totals[s] || 0), 0) || 1, tag = JSON.stringify(totals);
    if (tag === barTag) return;
    barTag = tag;
    const word = (s) => STATES.find((t) => t.id === s).word, there = order.filter((s) => totals[s] || s === "free" || s === "cached" || s === "request" || s === "quarantined");
    $("bar").replaceChildren(...order.filter((s) => totals[s]).map((s) => { const part = el("i", { class: s }); part.style.flexGrow = Math.max(totals[s], all / 250); return part; }));
    $("bar").setAttribute("aria-label", `Pages by state: ${order.filter((s) => totals[s]).map((s) => `${count(totals[s])} ${word(s)}`).join(", ")}`);
    $("legend").replaceChildren(...there.map((s) => el("li", { class: "key" }, el("i", { class: `swatch ${s}` }), el("b", {}, count(totals[s] || 0)), ` ${word(s)}`)));
  }

  // Details
  async function open(title, url, query, body, again) {
    detail = { title, from: document.activeElement };
    $("detail").hidden = false;
    $("detail-body").replaceChildren(el("h2", {}, title), el("p", { class: "quiet" }, "asking the engine"));
    $("detail-body").focus();
    try {
      const found = await ask(`dashboard/look?${new URLSearchParams({ ...query, ...(model.isRouter ? { engine: url } : {}) })}`);
      $("detail-body").replaceChildren(el("h2", {}, title), ...body(found), el("p", {}, el("button", { type: "button", on: { click: again } }, "Look again")));
    } catch (error) { $("detail-body").replaceChildren(el("h2", {}, title), el("p", { class: "why" }, String(error.message))); }
  }
  const STATE_WORDS = { tree: "cached", request: "in a request" };
  const facts = (rows) => el("dl", {}, ...rows.filter(([, v]) => v !== null && v !== undefined && v !== "").flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)]));
  function openPage(engine, pool, page) {
    engine.picked = `${pool.tier} ${pool.part} ${page}`;
    if (pool.tier === "storage") { detail = { from: document.activeElement }; $("detail").hidden = false; $("detail-body").replaceChildren(el("h2", {}, "A page in files"), el("p", {}, "It is verified by the digest of its bytes and by its stamps each time that it is read, before a request uses it.")); return; }
    open(`Page ${count(page)}`, engine.url, { what: "page", tier: pool.tier, part: pool.part, page }, (f) => {
      const [, log = ""] = f.history.match(/last operations: (.*)$/) || [];
      const holds = Object.entries(f.holds).map(([k, n]) => `${k} (${n})`).join(", ");
      const node = f.node ? el("button", { type: "button", class: "link-button", on: { click: () => openNode(engine, { id: f.node }) } }, `node ${f.node}, position ${f.position}`) : "";
      const stamped = f.stamps && f.stamps.tail_k ? Object.entries(f.stamps).filter(([lane]) => lane.startsWith("tail")) : [];
      return [el("p", { class: "quiet" }, `${poolName(engine, pool)}, slots ${f.first_slot} to ${f.first_slot + (engine.sections.about || {}).page_size - 1}`),
        facts([["State", STATE_WORDS[f.state] || f.state.replaceAll("_", " ")], ["Owner", f.owner], ["In the tree", node], ["Used by", f.users.join(", ") || "no request now"], ["Verified", f.verified_s === null || !["tree", "request"].includes(f.state) ? "" : `${span(Math.max(0, f.verified_s))} ago`], ["Failures", f.failures ? String(f.failures) : ""], ["Held by", holds]]),
        el("h3", {}, "History"), el("ol", { class: "history" }, ...log.split("; ").filter(Boolean).map((line) => el("li", {}, line))),
        ...stamped.slice(0, 1).flatMap(([lane, rows]) => [el("h3", {}, `Stamps (${lane.replace("_", " ")})`), el("table", { class: "stamps" }, el("thead", {}, el("tr", {}, ...["Slot", "Token", "Position", "Chain", "Digest"].map((h) => el("th", { scope: "col" }, h)))), el("tbody", {}, ...rows.map(([token, at, chain, digest], i) => el("tr", {}, el("td", {}, f.first_slot + i), el("td", {}, token), el("td", {}, at), el("td", { title: chain }, chain.slice(0, 8)), el("td", { title: digest }, digest.slice(0, 8))))))])];
    }, () => openPage(engine, pool, page));
  }
  function openNode(engine, node) {
    open(`Node ${node.id}`, engine.url, { what: "node", node: node.id }, (f) => [
      facts([["Tokens", `${count(f.end - f.start)}, positions ${f.start} to ${f.end - 1}`], ["Hits", count(f.hits)], ["Pins", `${f.pins} (${f.leases} of requests that end here)`], ["On the device", `${many(f.device.reduce((a, b) => a + b, 0), "page")}`], ["On the host", f.host.some(Boolean) ? many(f.host.reduce((a, b) => a + b, 0), "page") : "none"], ["Unused for", `${many(f.idle, "operation")} of the cache`], ["Children", String(f.children)]]),
      ...(f.text !== undefined ? [el("h3", {}, "Text of the prefix"), el("p", { class: "prefix" }, el("span", { class: "before" }, f.before_text), el("mark", {}, f.text))] : [el("h3", {}, "Token ids"), el("p", { class: "prefix" }, f.tokens.join(" "))]),
    ], () => openNode(engine, node));
  }
  function closeDetail() { $("detail").hidden = true; for (const e of model.engines.values()) e.picked = ""; dirty = true; if (detail && detail.from && detail.from.focus) detail.from.focus(); detail = null; }
  $("detail-close").addEventListener("click", closeDetail);
  document.addEventListener("keydown", (e) => {
    if (e.key === "Escape" && !$("detail").hidden) closeDetail();
    if (/^[1-5]$/.test(e.key) && !e.ctrlKey && !e.metaKey && !e.altKey && !/INPUT|TEXTAREA/.test(e.target.tagName)) { show(TABS[e.key - 1][0]); $(`tab-${tab}`).focus(); }
  });
  $("pause").addEventListener("click", () => { paused = !paused; dirty = true; $("pause").setAttribute("aria-pressed", String(paused)); $("pause").textContent = paused ? "Go on" : "Pause"; });

  // The loop
  let at = 0, panels = 0, ratesAt = 0, frames = 0;
  function tick(now) {
    requestAnimationFrame(tick);
    if (now - at < 30 || document.hidden || (paused && !dirty)) return;
    at = now;
    const engines = shown();
    if (!palette || theme !== css("--ink")) { theme = css("--ink"); palette = paletteNow(); dirty = true; }
    if (tab === "map") { map.draw(engines, now, palette); frames++; }
    if (dirty || now - panels > 500) {
      panels = now;
      pills(); headline(engines);
      const open = requestsOf(engines).filter((r) => !r.ended).length, stories = storiesOf(engines).length;
      badge("requests", open); badge("incidents", stories, stories > 0); badge("handoffs", handoffsOf(engines).filter((h) => !(h.decode || h.prefill).ended).length);
      if (tab === "requests") requests.draw(engines);
      if (tab === "handoffs") handoffs.draw(engines);
      if (tab === "incidents") incidents.draw(engines);
      const link = { live: paused ? "paused" : "live", lost: "reconnecting", connecting: "connecting", key: "locked" }[model.link];
      if ($("link").textContent !== link) { $("link").textContent = link; $("link").className = `link ${model.link}`; }
    }
    if (dirty || now - ratesAt > 500) { ratesAt = now; rates.draw(engines, theme); }
    dirty = false;
  }
  function badge(id, n, bad) { const b = $(`tab-${id}`).querySelector(".badge"), text = n ? String(n) : ""; if (b.textContent !== text) b.textContent = text; b.classList.toggle("bad", !!bad); }
  addEventListener("resize", () => { dirty = true; });

  function denied() {
    const dialog = $("key");
    if (!dialog.open) dialog.showModal();
    return new Promise((go) => dialog.addEventListener("close", () => { sessionStorage.setItem("serinus-key", $("key-value").value); $("key-value").value = ""; go(); }, { once: true }));
  }
  show(tab);
  requestAnimationFrame(tick);
  follow(model, { changed: () => { dirty = dirty || model.link !== "live"; }, denied });
  window.serinus = { model, map, frames: () => frames }; // for tests and for curious people
})();
