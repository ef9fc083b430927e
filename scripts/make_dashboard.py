"""Writes deploy/grafana/serinus.json and the tables of docs/OBSERVE.md: panels are the data below, alerts are those of
deploy/prometheus/alerts.yaml.

    python scripts/make_dashboard.py            # writes both
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

REPO = Path(__file__).parents[1]
DASHBOARD, ALERTS = REPO / "deploy/grafana/serinus.json", REPO / "deploy/prometheus/alerts.yaml"
PAGE = REPO / "docs/OBSERVE.md"
SOURCE = {"type": "prometheus", "uid": "${datasource}"}
OF_ENGINE = 'instance=~"$instance",engine=~"$engine"'
OF_ROUTER = 'instance=~"$instance"'


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One panel: a few queries over time, or the latest value of one."""

    title: str
    queries: dict[str, str]
    """PromQL by legend. `NAME{}` stands for the series of the engines chosen, `NAME{router}` for those of routers."""
    about: str
    """What it shows, and what to do at it."""
    unit: str = "short"
    kind: str = "timeseries"
    stack: bool = False
    red: float | None = None
    """From this value on a stat is red."""


def rate(name: str, by: str = "engine", more: str = "") -> str:
    return f"sum by ({by}) (rate(serinus:{name}{{{more}}}[$__rate_interval]))"


def quantiles(name: str, *levels: float) -> dict[str, str]:
    inner = f"sum by (le) (rate(serinus:{name}_bucket{{}}[$__rate_interval]))"
    return {f"p{level * 100:g}": f"histogram_quantile({level}, {inner})" for level in levels}


def gauges(**legends: str) -> dict[str, str]:
    """The sum of a gauge by engine, for each `legend=name`."""
    return {f"{legend} {{{{engine}}}}": f"sum by (engine) (serinus:{name}{{}})" for legend, name in legends.items()}


ROWS: dict[str, tuple[Panel, ...]] = {
    "Serving": (
        Panel(title="Requests", queries=gauges(running="num_running_reqs", waiting="num_queue_reqs"),
              about="In the batch, and waiting for it. Waiting grows and never falls: more decode engines, or"
              " `--max-queued-requests` lower, so that clients are refused sooner."),
        Panel(title="Tokens per second", unit="short",
              queries={"generated {{engine}}": rate("generation_tokens_total"),
                       "computed {{engine}}": rate("computed_tokens_total")},
              about="Tokens of answers, and all that went through the model (prompts and recomputed ones too)."),
        Panel(title="Time to first token", unit="s", queries=quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
              about="As clients see it. High: look at *Queue time* (too few engines), then at *Handoff latency*, then"
              " at *Step time* (chunks too large: `--max-step-ms`)."),
        Panel(title="Time between tokens", unit="s", queries=quantiles("inter_token_latency_seconds", 0.5, 0.99),
              about="As clients see it. A p99 far above the p50: prompts share the steps; smaller"
              " `--chunked-prefill-size`, or prefill engines of their own."),
        Panel(title="Whole requests", unit="s", queries=quantiles("e2e_request_latency_seconds", 0.5, 0.99),
              about="From request to the end of its answer."),
        Panel(title="Queue time", unit="s", queries=quantiles("queue_time_seconds", 0.5, 0.99),
              about="From arrival to the first step that worked for a request. High: engines lack room or time."),
        Panel(title="Step time", unit="s", queries=quantiles("step_seconds", 0.5, 0.99),
              about="One step of the loop. Compare the p50 with `serinus bench` on an idle machine."),
        Panel(title="HTTP answers", unit="reqps", stack=True,
              queries={"{{status}}": rate("http_requests_total", "status")},
              about="499: the client hung up. 429: limits of API keys. 503: no room or no engine. 500: read the log for"
              " the request id of the answer."),
        Panel(title="Answers by end", unit="reqps", stack=True,
              queries={"{{reason}}": rate("num_finished_requests_total", "reason"),
                       "retracted": "sum(rate(serinus:num_retracted_requests_total{}[$__rate_interval]))"},
              about="`error` goes with a line in the log. `retracted` is not an end: a request gave its pages back"
              " under pressure; often means too many `--max-running-requests` for the pool."),
        Panel(title="Tokens by API key", stack=True, queries={"{{key}}": rate("api_key_tokens_total", "key")},
              about="Of prompts and answers, per second; empty without keys. docs/KEYS.md has weights and limits."),
        Panel(title="Engines behind routers", queries={
                  "up": "sum(serinus:router_engine_up{router})",
                  "circuit open": "sum(serinus:router_circuit_open{router})",
                  "retries/s": "sum(rate(serinus:router_retries_total{router}[$__rate_interval]))",
                  "broken streams/s": "sum(rate(serinus:router_broken_streams_total{router}[$__rate_interval]))"},
              about="Fewer up than there are: `GET /server_info` of the router says why of each."),
        Panel(title="Requests by engine", unit="reqps", queries={
                  "{{to}}": "sum by (to) (rate(serinus:router_requests_total{router}[$__rate_interval]))"},
              about="Where routers send requests. One engine far above the others under `cache_aware`: one prefix is"
              " hot; `--policy least_loaded` spreads it."),
    ),
    "Cache and tiers": (
        Panel(title="KV usage", unit="percentunit", queries={
                  "{{engine}}": "max by (engine) (serinus:token_usage{})",
                  "sliding layers {{engine}}": "max by (engine) (serinus:swa_token_usage{})"},
              about="Used part of the pool. Near 1 with requests waiting: more memory, shorter contexts, or tiers."),
        Panel(title="Prompt tokens found cached", unit="percentunit", stack=True, queries={
                  "{{source}}": rate("cached_tokens_total", "source")
                  + " / on () group_left () sum(rate(serinus:prompt_tokens_total{}[$__rate_interval]))"},
              about="By tier, as a part of all prompt tokens. Low with repeated prompts: look at *Evicted*; with"
              " several engines, `--policy cache_aware`."),
        Panel(title="Pages", stack=True,
              queries={"{{tier}} {{part}} {{state}}": "sum by (tier, part, state) (serinus:pages{})"},
              about="Of each pool, by state. `quarantined` and `retired` hold KV that was found wrong, see *Canary*."),
        Panel(title="Host tier", unit="short", queries=gauges(
                  used="hicache_host_used_tokens", room="hicache_host_total_tokens"),
              about="Tokens of KV in host memory; 0 without `--enable-hierarchical-cache`."),
        Panel(title="KV between tiers", queries={
                  "to host": "sum(rate(serinus:hicache_backup_tokens_total{}[$__rate_interval]))",
                  "from host": "sum(rate(serinus:load_back_tokens_total{}[$__rate_interval]))",
                  "to storage": "sum(rate(serinus:backuped_tokens_total{}[$__rate_interval]))",
                  "from storage": "sum(rate(serinus:prefetched_tokens_total{}[$__rate_interval]))"},
              about="Tokens per second."),
        Panel(title="Evicted", queries={
                  "evicted": "sum(rate(serinus:evicted_tokens_total{}[$__rate_interval]))",
                  "dropped, host full": "sum(rate(serinus:hicache_dropped_tokens_total{}[$__rate_interval]))",
                  "failed copies": "sum(rate(serinus:hicache_failed_copies_total{}[$__rate_interval]))"},
              about="Tokens per second that left the device, and the part that is kept nowhere: a larger"
              " `--hicache-ratio`. Failed copies cost time only; they repeat: look at the memory of the host."),
        Panel(title="Time of evictions and loads", unit="s", queries={
                  f"{legend} p99": f"histogram_quantile(0.99, sum by (le) (rate(serinus:{name}_bucket{{}}"
                  "[$__rate_interval])))"
                  for legend, name in (("eviction", "eviction_duration_seconds"),
                                       ("load", "load_back_duration_seconds"),
                                       ("backup", "hicache_backup_duration_seconds"))},
              about="Steps wait for an eviction; loads run beside them."),
    ),
    "Handoff": (
        Panel(title="Handoffs under way", queries=gauges(
                  **{"wait for pages": "num_decode_prealloc_queue_reqs", "granted": "num_decode_transfer_queue_reqs",
                     "wait for a grant": "num_prefill_bootstrap_queue_reqs",
                     "being fetched": "num_prefill_inflight_queue_reqs"}),
              about="`wait for pages` grows: decode is full. `wait for a grant` grows on prefill: the same, seen from"
              " there. `granted` grows: prefill is slow, more prefill engines."),
        Panel(title="KV handed over", unit="Bps",
              queries={"{{engine}} {{direction}}": rate("kv_transfer_bytes_total", "engine, direction")},
              about="Bytes per second."),
        Panel(title="Handoff latency", unit="ms", queries=quantiles("kv_transfer_latency_ms", 0.5, 0.99),
              about="First byte to last. High with small prompts: the backend; `serinus doctor` lists those found."),
        Panel(title="Waits of a handoff (p99)", unit="s", queries={
                  legend: f"histogram_quantile(0.99, sum by (le) (rate(serinus:{name}_bucket{{}}[$__rate_interval])))"
                  for legend, name in (("peer greeted", "kv_transfer_connect_seconds"),
                                       ("grant", "kv_transfer_grant_wait_seconds"),
                                       ("queue of prefill", "kv_transfer_queue_seconds"),
                                       ("computing", "kv_transfer_compute_seconds"))},
              about="Where the time before the first token went. The largest says which side lacks engines."),
        Panel(title="Handoffs that failed", unit="reqps", stack=True, queries={
                  "before the grant: {{cause}}": rate("num_bootstrap_failed_reqs_total", "cause"),
                  "after it: {{cause}}": rate("num_transfer_failed_reqs_total", "cause")},
              about="Each prompt was computed by decode after all (or answered 502). Causes: docs/HANDOFF.md."),
        Panel(title="Prompts computed by decode", unit="reqps", stack=True, queries={
                  "never sent: {{reason}}": rate("num_local_prompts_total", "reason"),
                  "sent in vain: {{reason}}": rate("num_recomputed_requests_total", "reason")},
              about="`short` is meant to be so. `no_prefill_engine`: the router knows none that is up."),
        Panel(title="Prefill engines, as decode sees them",
              queries={"{{engine}}: {{state}}": "sum by (engine, state) (serinus:kv_transfer_peers{})"},
              about="`refused`: layouts or secrets differ, the log says which field. `down`: tried again by itself."),
        Panel(title="Pages held back", queries={
                  **gauges(quarantine="kv_transfer_quarantined_pages", parked="kv_transfer_parked_tokens"),
                  "late frames/s": "sum(rate(serinus:kv_transfer_late_frames_total{}[$__rate_interval]))"},
              about="`quarantine`: a peer that vanished may still write them; it does not fall: restart that peer."),
        Panel(title="Wire", queries={
                  "refused frames: {{reason}}": rate("wire_bad_frames_total", "reason"),
                  "cut connections: {{reason}}": rate("wire_connections_cut_total", "reason"),
                  "sent again": "sum(rate(serinus:wire_retransmits_total{}[$__rate_interval]))"},
              about="Zero on a sound network. Refused frames: another version, or something else speaks to the port."),
    ),
    "Canary": (
        Panel(title="Incidents", kind="stat", red=1,
              queries={"{{engine}}": "sum by (engine) (increase(serinus:kv_canary_incidents_total{}[$__range]))"},
              about="Places where KV was found wrong in the time shown. More than 0: `serinus canary show URL` tells"
              " each story; docs/CANARY.md says what follows."),
        Panel(title="Coverage", unit="percentunit", kind="stat",
              queries={"{{engine}}": "min by (engine) (serinus:kv_canary_coverage_ratio{})"},
              about="Verified part of what had to be verified: 1, or something is broken."),
        Panel(title="Violations", stack=True, queries={
                  "{{reason}} {{tag}}":
                  "sum by (reason, tag) (increase(serinus:kv_canary_violations_total{}[$__rate_interval]))"},
              about="By reason and by the check that saw it."),
        Panel(title="Last verified", unit="s",
              queries={"{{engine}} {{page}}": "max by (engine, page) (serinus:kv_canary_last_verified_seconds{})"},
              about="Age of the last look at cached pages. The oldest grows without bound: the sweep does not keep up;"
              " set `--kv-canary-sweep-interval` too."),
        Panel(title="Slots", queries={"{{engine}} {{state}}": rate("kv_canary_slots_total", "engine, state")},
              about="That had to be verified, and were, per second: the two lines are one."),
        Panel(title="Heals", stack=True, queries={
                  "{{result}}": "sum by (result) (increase(serinus:kv_canary_heals_total{}[$__rate_interval]))",
                  "tokens computed again": "sum(increase(serinus:kv_canary_healed_tokens_total{}[$__rate_interval]))"},
              about="What became of requests that read wrong KV under `--kv-canary heal`."),
        Panel(title="Quarantined and retired pages", queries={
                  "{{engine}} {{tier}} {{state}}": "sum by (engine, tier, state)"
                  ' (serinus:pages{state=~"quarantined|retired"})'},
              about="Wrong once: quarantined until a flush. Wrong twice: retired for good. Retired pages in one place:"
              " suspect the memory; drain the machine and test it."),
        Panel(title="Sweeps, and faults planted", queries={
                  "sweeps {{engine}}":
                  "sum by (engine) (increase(serinus:kv_canary_sweep_passes_total{}[$__rate_interval]))",
                  "planted {{kind}}":
                  "sum by (kind) (increase(serinus:kv_faults_injected_total{}[$__rate_interval]))"},
              about="Complete walks over cached pages; and faults of `--kv-canary-perturb`, which is a test."),
    ),
    "Ranks": (
        Panel(title="Where the ranks' time goes", unit="percentunit", queries={
                  "computes {{engine}} {{rank}}": rate("rank_compute_seconds_total", "engine, rank"),
                  "waits {{engine}} {{rank}}": rate("rank_wait_seconds_total", "engine, rank")},
              about="Seconds per second. One rank computes and all others wait: it is slow (its cores, its GPU)."),
        Panel(title="Pipeline bubble", unit="percentunit",
              queries={"{{engine}} {{rank}}": "max by (engine, rank) (serinus:pp_bubble_fraction{})"},
              about="Part of the time in which a stage had nothing to compute though steps were under way."),
        Panel(title="Commands", unit="s",
              queries={"{{engine}}": "max by (engine) (serinus:control_step_seconds{})"},
              about="Seconds of the leader per step for telling its ranks, and hearing from them."),
        Panel(title="Commands: bytes", unit="Bps", queries={"{{engine}}": rate("control_bytes_total")},
              about="Of the headers that the leader sends."),
        Panel(title="Work under way at ranks", queries={
                  "copies {{rank}}": "sum by (rank) (serinus:rank_tier_copies{})",
                  "storage {{rank}}": "sum by (rank) (serinus:rank_storage_operations{})",
                  "staged pieces {{rank}}": "sum by (rank) (serinus:rank_staged_pieces{})"},
              about="One rank far above the others holds all of them up."),
    ),
}  # fmt: skip


def query(text: str) -> str:
    """PromQL with the variables of the dashboard for each `{}` and `{router}` of a panel."""
    text = text.replace("{router}", f"{{{OF_ROUTER}}}").replace("{}", f"{{{OF_ENGINE}}}")
    return re.sub(r'\{(state=~"[^"]*")\}', rf"{{\1,{OF_ENGINE}}}", text)


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    """Grafana's form of one panel."""
    custom = {"fillOpacity": 20 if panel.stack else 0, "stacking": {"mode": "normal" if panel.stack else "none"}}
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red is not None:
        steps.append({"color": "red", "value": panel.red})
    defaults: dict[str, Any] = {"unit": panel.unit, "thresholds": {"mode": "absolute", "steps": steps}}
    options: dict[str, Any] = {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}}
    if panel.kind == "stat":
        options = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background"}
    else:
        defaults |= {"min": 0, "custom": custom}
    targets = [
        {"datasource": SOURCE, "expr": query(text), "legendFormat": legend, "refId": chr(ord("A") + index)}
        for index, (legend, text) in enumerate(panel.queries.items())
    ]
    return {
        "id": number, "type": panel.kind, "title": panel.title, "description": panel.about, "datasource": SOURCE,
        "gridPos": {"x": x, "y": y, "w": 8, "h": 7}, "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options, "targets": targets,
    }  # fmt: skip


def variable(name: str, label: str, labels: str) -> dict[str, Any]:
    """A variable with the values of a label of `serinus:model_info`."""
    asked = f"label_values(serinus:model_info{{{labels}}}, {label})"
    return {
        "name": name, "type": "query", "datasource": SOURCE, "query": {"query": asked, "refId": name}, "refresh": 2,
        "includeAll": True, "multi": True, "allValue": ".*", "current": {"text": "All", "value": "$__all"}, "sort": 1,
    }  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The whole dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"id": len(panels) + 1, "type": "row", "title": title, "collapsed": False, "panels": [],
                       "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})  # fmt: skip
        y += 1
        for index, panel in enumerate(row):
            panels.append(panel_json(panel, len(panels) + 1, index % 3 * 8, y + index // 3 * 7))
        y += -(-len(row) // 3) * 7
    source = {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Data source"}
    variables = [
        source,
        variable("model", "model_name", ""),
        variable("instance", "instance", 'model_name=~"$model"'),
        variable("engine", "engine", 'model_name=~"$model",instance=~"$instance"'),
    ]
    return {
        "uid": "serinus", "title": "Serinus", "tags": ["serinus", "llm"], "schemaVersion": 39, "editable": True,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables}, "panels": panels,
    }  # fmt: skip


def tables() -> dict[str, str]:
    """The generated parts of docs/OBSERVE.md, by the name of their marker."""
    panels = []
    for title, row in ROWS.items():
        panels += [f"### {title}", "", "| panel | what it shows, what to do |", "|---|---|"]
        panels += [f"| {panel.title} | {panel.about} |" for panel in row]
        panels.append("")
    alerts = ["| alert | severity | fires when | what to do |", "|---|---|---|---|"]
    for group in yaml.safe_load(ALERTS.read_text())["groups"]:
        for rule in group["rules"]:
            notes = rule["annotations"]
            alerts.append(f"| `{rule['alert']}` | {rule['labels']['severity']} | {notes['when']} | {notes['action']} |")
    return {"panels": "\n".join(panels).rstrip(), "alerts": "\n".join(alerts)}


def page(text: str) -> str:
    """docs/OBSERVE.md with its tables as they are now."""
    for name, table in tables().items():
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        head, _, rest = text.partition(begin)
        text = f"{head}{begin}\n{table}\n{end}{rest.partition(end)[2]}"
    return text


def rendered() -> str:
    """The text of deploy/grafana/serinus.json: a panel a line."""
    whole = dashboard()
    lines = ",\n".join(json.dumps(panel) for panel in whole.pop("panels"))
    return f'{json.dumps(whole)[:-1]}, "panels": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    DASHBOARD.write_text(rendered())
    PAGE.write_text(page(PAGE.read_text()))
