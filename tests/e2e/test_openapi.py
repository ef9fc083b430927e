"""The description at /openapi.json against what a real engine and a real router answer, by schemathesis: requests drawn
from it, answers held against it. In `make proof`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis.checks import load_all_checks, not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from serinus.testing.servers import Server

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::DeprecationWarning")]
CHECKS = [
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
]
EXAMPLES = 12
SMALL = (
    "--dtype", "float32", "--max-total-tokens", "4096", "--page-size", "8", "--context-length", "192",
    "--served-model-name", "canary",
)  # fmt: skip


@pytest.fixture(scope="module", params=["serve", "up"])
def server(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Server]:
    more = ("--prefill", "1", "--decode", "1") if request.param == "up" else ()
    with Server(request.param, str(checkpoint), *more, *SMALL) as running:
        yield running


BASES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two three", "max_tokens": 9},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 9},
    "/v1/responses": {"input": "one", "max_output_tokens": 9},
    "/v1/messages": {"messages": [{"role": "user", "content": "one"}], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "one"}]},
    "/generate": {"text": ["one", "two"], "sampling_params": {"max_new_tokens": 9}},
    "/tokenize": {"prompt": "one"},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/models/{name}": {},
}
"""What an endpoint answers with 200; drawn fields of PLAIN beside it."""
PLAIN = {
    "temperature", "top_k", "top_p", "min_p", "seed", "n", "stop", "stream", "stream_options", "logprobs",
    "top_logprobs", "echo", "return_meta_info", "return_logprob", "logprob_start_len", "top_logprobs_num",
    "return_text_in_logprobs", "priority", "user", "instructions", "metadata", "add_special_tokens", "ignore_eos",
    "repetition_penalty",
}  # fmt: skip


def plain(case: Any) -> Any:
    """The same with a prompt that is one, and without most of what the drawn body asks for."""
    if "name" in case.path_parameters:
        case.path_parameters = {"name": "canary"}
        return case
    body = case.body if isinstance(case.body, dict) else {}
    native = case.operation.path == "/generate"  # its lists have a value for each prompt
    drawn = {k: v for k, v in body.items() if k in PLAIN and not (native and isinstance(v, list))}
    case.body = {**drawn, **BASES[case.operation.path]}
    if body.get("n"):
        case.body["n"] = min(body["n"], 3) if case.operation.path in ("/v1/completions", "/v1/chat/completions") else 1
    return case


def checked(case: Any) -> int:
    """Send it, and hold the answer against the description; its status."""
    answer = case.call(timeout=60)
    case.validate_response(answer, checks=CHECKS if answer.status_code == 504 else [*CHECKS, not_a_server_error])
    return int(answer.status_code)


def drive(strategy: Any, statuses: set[int]) -> None:
    """Requests that are drawn of it."""

    @seed(17)
    @settings(
        max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=strategy)
    def drawn(case: Any) -> None:
        statuses.add(checked(case))

    drawn()


@pytest.mark.timeout(280)
def test_answers_are_as_they_are_described(server: Server) -> None:
    load_all_checks()
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    schema.validate()
    answered: dict[str, set[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        statuses = answered.setdefault(f"{operation.method.upper()} {operation.path}", set())
        as_described = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
        drive(as_described, statuses)
        if operation.body or operation.query:
            drive(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), statuses)
        if operation.path in BASES:
            drive(as_described.map(plain), statuses)
    refuse = {"POST /v1/embeddings", "POST /canary/perturb", "POST /workers", "DELETE /workers"}
    refuse.add("GET /dashboard/look")  # what is drawn names no page; for those, see tests/front/test_dashboard.py
    assert {name for name, seen in answered.items() if not seen & {200, 202}} <= refuse, answered
