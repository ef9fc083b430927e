// Rates of all shown engines together, as small charts: sums of tokens and queues, the slowest engine's times.
const sum = (values) => (values.length ? values.reduce((a, b) => a + b, 0) : null);
const most = (values) => (values.length ? Math.max(...values) : null);
const mean = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);
const number = (v) => (v === null || v === undefined ? "–" : v < 10 && v % 1 ? v.toFixed(1) : count(v));
const millis = (v) => (v === null || v === undefined ? "–" : v < 1000 ? `${v < 10 ? v.toFixed(1) : Math.round(v)} ms` : `${(v / 1000).toFixed(1)} s`);
const CHARTS = [
  { title: "Tokens per second", series: [["generated", "generated_rate", sum, "--c1"], ["prompt", "prompt_rate", sum, "--c2"]], word: number, zero: true },
  { title: "First token", series: [["median", "ttft_ms", most, "--c1"]], word: millis, points: true },
  { title: "Between tokens", series: [["median", "itl_ms", most, "--c1"]], word: millis },
  { title: "Requests", series: [["running", "running", sum, "--c1"], ["queued", "queued", sum, "--c2"]], word: (v) => number(v === null || v === undefined ? v : Math.round(v)), zero: true },
  { title: "Found in the cache", series: [["of the prompts", "hit_rate", mean, "--c1"]], word: (v) => (v === null || v === undefined ? "–" : `${Math.round(v * 100)} %`), top: 1, points: true },
  { title: "Decode step", series: [["step", "step_ms", most, "--c1"], ["floor", "floor_ms", most, "--c2", true]], word: millis },
];

function seriesOf(engines, name, join) {
  const buckets = new Map();
  for (const engine of engines) for (const r of engine.rates) {
    const at = Math.round(r.at);
    if (!buckets.has(at)) buckets.set(at, new Map());
    const v = r[name];
    if (v === null || v === undefined) continue;
    const known = buckets.get(at), before = known.get(engine.url);
    known.set(engine.url, before === undefined ? v : (before + v) / 2);
  }
  return new Map([...buckets].map(([at, by]) => [at, join([...by.values()])]));
}

class Rates {
  constructor(root) {
    this.cards = CHARTS.map((chart) => {
      const value = el("strong", {}, "–"), second = el("span", { class: "second" }), peak = el("span", { class: "second" }), plot = el("div", { class: "plot", "aria-hidden": "true" });
      const box = el("figure", { class: "card", title: "The last two minutes" }, el("figcaption", {}, el("span", { class: chart.top ? "title wide" : "title" }, chart.title), chart.top ? "" : peak, value, second), plot);
      root.append(box);
      return { chart, box, value, second, peak, plot };
    });
    this.theme = ""; this.drawn = 0;
  }
  draw(engines, theme) {
    const wide = this.cards[0].plot.clientWidth;
    if (!wide) return;
    const fresh = theme !== this.theme || wide !== this.wide;
    Object.assign(this, { theme, wide });
    const end = Math.max(0, ...engines.map((e) => Math.round(e.unix))), first = Math.min(end - 20, ...engines.map((e) => (e.rates.length ? e.rates[0].at : end)));
    for (const card of this.cards) {
      const { chart } = card, found = chart.series.map(([, name, join]) => seriesOf(engines, name, join));
      const times = [...new Set(found.flatMap((f) => [...f.keys()]))].filter((t) => t > end - 120).sort((a, b) => a - b);
      const data = [times, ...found.map((f) => times.map((t) => (f.has(t) ? f.get(t) : null)))];
      if (fresh && card.plotter) { card.plotter.destroy(); card.plotter = null; }
      if (!card.plotter) card.plotter = this.make(card, data);
      card.plotter.setData(data, false);
      const values = data.slice(1).flat().filter((v) => v !== null), top = chart.top || Math.max(1e-3, ...values) * 1.15;
      card.plotter.setScale("y", { min: 0, max: top }); card.plotter.setScale("x", { min: Math.max(end - 120, first), max: end });
      const last = found.map((f) => { for (let t = end; t > end - (chart.zero ? 4 : 120); t--) if (f.get(t) !== null && f.get(t) !== undefined) return f.get(t); return null; });
      card.peak.textContent = chart.top || !values.length ? "" : `peak ${chart.word(Math.max(...values))}`;
      card.value.textContent = chart.word(last[0]);
      card.second.textContent = chart.series.length > 1 ? `${chart.series[1][0]} ${chart.word(last[1])}` : chart.series[0][0];
      card.box.setAttribute("aria-label", `${chart.title}: ${chart.series.map(([word], i) => `${word} ${chart.word(last[i])}`).join(", ")}`);
    }
  }
  make(card, data) {
    const { chart, plot } = card;
    plot.replaceChildren();
    return new uPlot({
      width: plot.clientWidth, height: 58, legend: { show: false }, cursor: { show: false }, padding: [4, 0, 2, 0],
      scales: { x: { time: true, range: (u, a, b) => [a, b] }, y: { range: (u, a, b) => [a, b] } }, axes: [{ show: false }, { show: false }],
      series: [{}, ...chart.series.map(([, , , color, dashed], i) => ({ stroke: css(color), width: i ? 1.5 : 2, fill: i || dashed ? undefined : `${css(color)}22`, dash: dashed ? [4, 3] : undefined, spanGaps: true, points: { show: !!chart.points, size: 4, fill: css(color), width: 0 } }))],
    }, data, plot);
  }
}
