"""Models, tokenize, server_info, metrics, flush, schema."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families

from serinus.core.metrics import Metrics
from serinus.front.exposition import merge_expositions
from serinus.front.metrics import FrontMetrics, RouterMetrics
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.text import Tokenizer


def test_the_model_served_is_listed(front: RunningFront) -> None:
    client = openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["canary"]
    card = client.models.retrieve("canary")
    assert (card.id, card.owned_by) == ("canary", "serinus")
    assert front.http.get("/v1/models").json()["data"][0]["max_model_len"] == 256


def test_texts_become_ids_and_ids_texts(front: RunningFront, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello the")
    assert front.post("/tokenize", {"prompt": "hello the"}).json() == {
        "tokens": ids,
        "count": len(ids),
        "max_model_len": 256,
    }
    assert front.post("/tokenize", {"text": ["hello the", ""]}).json()["tokens"] == [ids, []]
    assert front.post("/detokenize", {"tokens": ids}).json()["text"] == "hello the"
    assert front.post("/detokenize", {"tokens": [ids, [1]]}).json()["text"] == ["hello the", "\x01"]
    assert front.post("/detokenize", {"tokens": []}).json()["text"] == ""
    eos = tokenizer.encode("<eos>")
    assert front.post("/detokenize", {"tokens": eos}).json()["text"] == "<eos>"
    assert front.post("/detokenize", {"tokens": eos, "skip_special_tokens": True}).json()["text"] == ""


def test_a_chat_is_tokenized_as_it_would_be_asked(front: RunningFront, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hello"}]
    shown = front.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert shown == tokenizer.encode("<|user|>hello<eos><|assistant|>", add_special_tokens=False)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "text": "y"}, "prompt"),
        ("/tokenize", {"prompt": []}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [9999]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1, [2]]}, "tokens"),
    ],
)
def test_wrong_texts_and_ids_are_refused(front: RunningFront, path: str, body: dict[str, Any], field: str) -> None:
    response = front.post(path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, field)


def test_a_long_text_is_tokenized_aside_with_the_same_result(front: RunningFront, tokenizer: Tokenizer) -> None:
    text = "hello the abc " * 2000
    assert front.post("/tokenize", {"prompt": text}).json()["tokens"] == tokenizer.encode(text)


def test_counters_come_without_a_time_of_birth(front: RunningFront) -> None:
    assert front.http.get("/v1/models").status_code == 200
    text = front.http.get("/metrics").text
    assert "serinus:http_requests_total" in text
    assert "_created" not in text


def test_server_info_says_what_a_router_must_know(front: RunningFront) -> None:
    for path in ("/server_info", "/get_server_info"):
        info = front.http.get(path).json()
        assert (info["engine"], info["role"], info["served_model_name"]) == ("fake-0", "unified", "canary")
        assert (info["context_length"], info["vocab_size"], info["page_size"]) == (256, 267, 16)
        assert info["load"] == {"num_running_reqs": 0, "num_queue_reqs": 0}
        assert info["startup_seconds"] == {"imports": 0.5}


def test_metrics_join_engine_and_front(front: RunningFront) -> None:
    front.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
    text = front.http.get("/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert "serinus:num_running_reqs" in families
    (open_connections,) = families["serinus:http_connections"].samples
    assert open_connections.value >= 1
    requests = families["serinus:http_requests"].samples
    served = [s.value for s in requests if s.labels["path"] == "/v1/completions" and s.labels["status"] == "200"]
    assert sum(served) >= 1
    for stem in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        samples = families[f"serinus:{stem}"].samples
        assert sum(sample.value for sample in samples if sample.name.endswith("_count")) >= 1
        assert {sample.labels["rank"] for sample in samples} == {"front"}
        assert {sample.labels["engine"] for sample in samples} == {"fake-0"}


SCRAPER = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"


def test_a_scraper_gets_the_format_and_the_encoding_that_it_asks_for(front: RunningFront) -> None:
    front.post("/v1/completions", {"prompt": "x", "max_tokens": 5})
    answer = front.http.get("/metrics", headers={"accept": SCRAPER, "accept-encoding": "gzip"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.headers["content-encoding"] == "gzip"
    assert int(answer.headers["content-length"]) < len(answer.content) / 3
    families = {family.name: family for family in open_metrics_families(answer.text)}  # strict: it ends with # EOF...
    assert families["serinus:http_requests"].type == "counter"
    assert families["serinus:time_to_first_token_seconds"].type == "histogram"
    assert families["serinus:num_running_reqs"].type == "gauge"
    for encoding in ("identity", "gzip;q=0", "br"):
        plain = front.http.get("/metrics", headers={"accept": "*/*", "accept-encoding": encoding})
        assert "content-encoding" not in plain.headers
        assert plain.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
        assert {family.name for family in text_string_to_metric_families(plain.text)} == families.keys()


def test_what_every_part_counts_is_open_metrics_too() -> None:
    engine = Metrics("e", "decode")
    engine.observe("queue_time_seconds", 0.5)
    texts = [engine.render().decode(), RouterMetrics(engine="r").exposition(), "# TYPE a untyped\na 1\n"]
    families = {
        family.name: family.type for family in open_metrics_families(merge_expositions(texts, open_metrics=True))
    }
    assert families["serinus:generation_tokens"] == "counter"
    assert (families["serinus:queue_time_seconds"], families["a"]) == ("histogram", "unknown")


def test_merged_expositions_keep_each_family_together_under_one_head() -> None:
    first, second = FrontMetrics(engine="a", role="prefill"), FrontMetrics(engine="b", role="decode")
    for metrics, count in ((first, 3), (second, 5)):
        for _ in range(count):
            metrics.opened()
            metrics.answered("/x", 200)
            metrics.first_token(0.1)
    merged = merge_expositions([first.exposition(), second.exposition(), "", "other 1\n"])
    heads = [line for line in merged.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads)) == len({line.split()[2] for line in heads})
    values = {}
    for family in text_string_to_metric_families(merged):
        for sample in family.samples:
            if sample.name in ("serinus:http_requests_total", "serinus:time_to_first_token_seconds_count"):
                values[sample.name, sample.labels["engine"]] = sample.value
    assert sorted(values.values()) == [3, 3, 5, 5]
    names = [line.split("{")[0].split(" ")[0] for line in merged.splitlines() if not line.startswith("#")]
    groups = [name for at, name in enumerate(names) if at == 0 or names[at - 1] != name]
    plain = [name for name in groups if not name.endswith(("_bucket", "_count", "_sum", "_created"))]
    assert len(plain) == len(set(plain))


def test_times_fall_into_buckets_as_prometheus_counts_them() -> None:
    metrics = FrontMetrics(engine="e", role="unified")
    plain = Histogram("plain", "", buckets=(0.001, 0.002, 0.005), registry=CollectorRegistry())
    for seconds, count in ((0.0005, 1), (0.001, 1), (0.006, 3), (9.0, 1), (0.0021, 1)):
        metrics.next_tokens(seconds, count)
        for _ in range(count):
            plain.observe(seconds / count)
    stem = "serinus:inter_token_latency_seconds"
    (family,) = [each for each in text_string_to_metric_families(metrics.exposition()) if each.name == stem]
    seen = {sample.labels.get("le", sample.name): sample.value for sample in family.samples}
    for sample in next(iter(plain.collect())).samples:
        if sample.name.endswith(("_bucket", "_count", "_sum")):
            key = sample.labels.get("le", sample.name.replace("plain", stem))
            assert seen[key] == pytest.approx(sample.value), key
    assert seen["5.0"] == 6
    assert seen["+Inf"] == 7
    assert family.type == "histogram"


def test_the_cache_is_flushed_unless_it_is_in_use(byte_folder: Path, new_endpoint: Callable[[], str]) -> None:
    engine = FakeEngine(endpoint=new_endpoint(), vocab_size=267, context_length=10_000, step_s=0.01)
    with running_front(front_settings(model_path=str(byte_folder)), engine) as front:
        assert front.http.post("/flush_cache").text == "Cache flushed.\n"
        body = {"prompt": "x", "max_tokens": 2000, "stream": True}
        with front.http.stream("POST", "/v1/completions", json=body), httpx.Client(base_url=front.url) as other:
            response = other.post("/flush_cache")
            assert response.status_code == 400
            assert "1 requests are running" in response.json()["error"]["message"]


def test_the_schema_describes_every_path_that_is_served(front: RunningFront) -> None:
    schema = front.http.get("/openapi.json").json()
    assert schema["openapi"].startswith("3.1")
    served = {route.path.replace(":path", "") for route in front.routes}
    assert set(schema["paths"]) == served
    text = str(schema)
    for name in ("CompletionBody", "ChatBody", "GenerateBody", "NativeSampling", "StreamOptions"):
        assert name in schema["components"]["schemas"]
        assert f"#/components/schemas/{name}" in text
    body = schema["components"]["schemas"]["CompletionBody"]
    assert body["required"] == ["prompt"]
    assert "guided_json" in body["properties"]
    assert "logits_processors" not in body["properties"]
    assert {"type": "null"} in body["properties"]["max_tokens"]["anyOf"]


def test_bounds_in_the_description_are_those_that_are_checked(front: RunningFront) -> None:
    properties = front.http.get("/openapi.json").json()["components"]["schemas"]["CompletionBody"]["properties"]
    tried = 0
    for field, schema in properties.items():
        for part in schema.get("anyOf", [schema]):
            if part.get("type") not in ("number", "integer"):
                continue
            for keyword, step in (("minimum", -1), ("maximum", 1), ("exclusiveMinimum", 0)):
                if keyword in part:
                    tried += 1
                    body = {"prompt": "x", "max_tokens": 4, field: part[keyword] + step}
                    answer = front.http.post("/v1/completions", json=body)
                    assert answer.status_code == 400, (field, keyword)
                    assert field in answer.json()["error"]["message"]
    assert tried > 20


def test_abort_all_of_a_query_says_yes_or_no(front: RunningFront) -> None:
    assert front.http.post("/abort_request?abort_all=1").status_code == 200
    answer = front.http.post("/abort_request?rid=x&abort_all=maybe")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "abort_all")
    assert front.http.post("/abort_request", json={"rid": "x" * 257}).status_code == 400
