"""`serinus bench serve`: flags, what the server says of itself, the run, the block, the line of JSON."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf, nan
from pathlib import Path
from typing import Any

from serinus.cli.bench.answer import BenchAnswer, read_answer
from serinus.cli.bench.dataset import DATASETS, DatasetSpec, Prompt, TextMaker, make_prompts
from serinus.cli.bench.dialect import DIALECTS, Asking, Dialect
from serinus.cli.bench.drive import BenchRun, Load, drive
from serinus.cli.bench.plot import plot_run
from serinus.cli.bench.report import Goodput, Report, make_report, result_block
from serinus.cli.bench.transport import Target, trace_request
from serinus.cli.parser import Command, Parser, UsageProblem, make_parser
from serinus.cli.show import check_folder, write_text
from serinus.core.addresses import http_url
from serinus.core.clock import WallClock
from serinus.core.errors import ConfigError
from serinus.engine.progress import counted

_DEFAULT_PORTS = {"serinus": 30000, "sglang": 30000}
_ASK_S_MAX = 30.0


def _count(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdigit() or int(text) < low:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected an integer, at least {low}")
        return int(text)

    return parse


def _number(holds: Callable[[float], bool], expected: str) -> Callable[[str], float]:
    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
        return value

    return parse


_rate = _number(lambda value: value > 0, "requests per second above 0, or inf")
_ratio = _number(lambda value: 0 <= value <= 1, "a number from 0 to 1")


def bench_parser(command: Command) -> Parser:
    """All flags, with the names and defaults of SGLang's benchmark; vLLM's as aliases."""
    parser = make_parser(command, settings=False)
    where = parser.add_argument_group("Which server")
    where.add_argument("--backend", default="serinus", choices=sorted(DIALECTS), help="how it is asked")
    where.add_argument("--base-url", metavar="URL", help="http(s)://host:port, in place of --host and --port")
    where.add_argument("--host", default="127.0.0.1", help="its address (default: 127.0.0.1)")
    where.add_argument("--port", type=_count(1), help="its port (default: 30000; 8000 for openai and vllm)")
    where.add_argument("--model", metavar="NAME", help="name of the model; default: the first it serves")
    where.add_argument("--tokenizer", metavar="PATH", help="to make and count texts with; default: the served model's")
    where.add_argument("--api-key", default="", metavar="KEY", help="sent as a bearer token")
    what = parser.add_argument_group("Which prompts")
    what.add_argument("--dataset-name", default="random", choices=DATASETS, help="kind of prompts (default: random)")
    what.add_argument("--dataset-path", default="", metavar="FILE", help="ShareGPT JSON file")
    what.add_argument(
        "--num-prompts",
        type=_count(1),
        default=1000,
        metavar="N",
        help="requests (default: 1000); of generated-shared-prefix its groups say how many",
    )
    for flag, default in (
        ("--random-input-len", 1024),
        ("--random-output-len", 1024),
        ("--gsp-num-groups", 64),
        ("--gsp-prompts-per-group", 16),
        ("--gsp-system-prompt-len", 2048),
        ("--gsp-question-len", 128),
        ("--gsp-output-len", 256),
    ):
        what.add_argument(flag, type=_count(1), default=default, metavar="N", help=f"default: {default}")
    what.add_argument(
        "--random-range-ratio", type=_ratio, default=0.0, metavar="R", help="lengths from R * length to length"
    )
    what.add_argument("--sharegpt-output-len", type=_count(2), metavar="N", help="instead of the recorded answer's")
    what.add_argument("--seed", type=_count(0), default=42, help="of prompts and arrivals (default: 42)")
    how = parser.add_argument_group("How they are sent")
    how.add_argument("--request-rate", type=_rate, default=inf, metavar="R", help="requests per second (default: inf)")
    how.add_argument("--max-concurrency", type=_count(1), metavar="N", help="requests in flight at most")
    how.add_argument(
        "--warmup-requests", "--num-warmups", type=_count(0), default=1, metavar="N", help="sent before (default: 1)"
    )
    how.add_argument("--flush-cache", action="store_true", help="empty the prefix cache before the run")
    how.add_argument("--disable-stream", action="store_true", help="ask for whole answers")
    how.add_argument("--disable-ignore-eos", action="store_true", help="let answers end where the model ends them")
    how.add_argument("--extra-request-body", metavar="JSON", help="object laid over every request")
    out = parser.add_argument_group("What comes out")
    out.add_argument("--output-file", metavar="FILE", help="append one line of JSON")
    out.add_argument("--output-details", action="store_true", help="with the lengths, times and texts of all requests")
    out.add_argument("--plot", metavar="FILE", help="draw throughput, latencies and their spread (SVG)")
    out.add_argument("--goodput", nargs="+", metavar="NAME:MS", help="count answers within e.g. ttft:500 tpot:50")
    out.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    return parser


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    """What a server says of itself, as far as it says it."""

    model: str
    vocab_size: int | None
    tokenizer_path: str


def run(command: Command, words: Sequence[str]) -> int:
    """Measure a server. Exit code 0, or 1 when a request failed. Raises UsageProblem for wrong flags."""
    parser = bench_parser(command)
    arguments = parser.arguments(words)
    extra = _extra(arguments.extra_request_body)
    check_folder("--plot", arguments.plot)
    goodput = Goodput.parse(arguments.goodput) if arguments.goodput else None
    return asyncio.run(_bench(arguments, extra, goodput))


def _extra(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise UsageProblem(f"--extra-request-body is no JSON ({error}), expected an object") from None
    if not isinstance(value, dict):
        raise UsageProblem(f"--extra-request-body is {text!r}, expected a JSON object")
    return value


async def _bench(arguments: argparse.Namespace, extra: dict[str, Any], goodput: Goodput | None) -> int:
    dialect = DIALECTS[arguments.backend]
    port = arguments.port or _DEFAULT_PORTS.get(arguments.backend, 8000)
    url = arguments.base_url or http_url(arguments.host, port)
    target = Target.from_url(url, arguments.api_key)
    server = await _ask_server(target, arguments)
    prompts = _prompts(arguments, dialect, server)
    asking = Asking(
        model=server.model,
        ignore_eos=not arguments.disable_ignore_eos,
        stream=not arguments.disable_stream,
        extra=extra,
    )
    bodies = [dialect.body(prompt, asking) for prompt in prompts]
    await _warm_up(arguments, target, dialect, prompts, bodies)
    load = Load(request_rate=arguments.request_rate, max_concurrency=arguments.max_concurrency, seed=arguments.seed)
    result = await _run(arguments, target, dialect.path, bodies, load)
    answers = [
        read_answer(prompt, got, native=dialect.native) for prompt, got in zip(prompts, result.traces, strict=True)
    ]
    report = make_report(answers, result.seconds, _about(arguments, url, server, len(prompts)), goodput)
    _tell(arguments, report, answers)
    return 1 if report.failed else 0


async def _get(target: Target, path: str) -> Any:
    """JSON at a path; None where the server has no such path. Raises ConfigError where there is no server."""
    got = await trace_request(target, "GET", path, b"", WallClock(), s_max=_ASK_S_MAX)
    if got.status == 0:
        raise ConfigError(f"bench: no answer at {target.url} ({got.failure}), expected a server")
    if got.status in (401, 403):
        raise ConfigError(f"bench: {path} answered {got.status}, expected the right --api-key")
    try:
        return json.loads(got.body) if got.status == 200 else None
    except ValueError:
        return None


async def _ask_server(target: Target, arguments: argparse.Namespace) -> _Server:
    models = await _get(target, "/v1/models") or {}
    info = await _get(target, "/server_info") or await _get(target, "/get_model_info") or {}
    names = [card["id"] for card in models.get("data", [])]
    model = arguments.model or (names[0] if names else info.get("model_path", ""))
    vocab = info.get("vocab_size")
    path = arguments.tokenizer or info.get("tokenizer_path") or info.get("model_path") or model
    return _Server(model=model, vocab_size=vocab if isinstance(vocab, int) else None, tokenizer_path=path)


def _prompts(arguments: argparse.Namespace, dialect: Dialect, server: _Server) -> list[Prompt]:
    """The dataset; as ids where the server takes ids and no texts are needed."""
    as_text = dialect.needs_text or arguments.dataset_name == "sharegpt" or arguments.tokenizer is not None
    as_text = as_text and arguments.dataset_name != "random-ids"
    texts: TextMaker | None = None
    vocab = server.vocab_size
    if as_text or vocab is None:
        from serinus.text import load_tokenizer

        tokenizer = load_tokenizer(server.tokenizer_path)
        texts, vocab = tokenizer, vocab or tokenizer.vocab_size
    spec = DatasetSpec(
        name=arguments.dataset_name,
        path=arguments.dataset_path,
        count=arguments.num_prompts,
        input_tokens=arguments.random_input_len,
        output_tokens=arguments.random_output_len,
        range_ratio=arguments.random_range_ratio,
        sharegpt_output_tokens=arguments.sharegpt_output_len,
        group_count=arguments.gsp_num_groups,
        group_prompts=arguments.gsp_prompts_per_group,
        system_tokens=arguments.gsp_system_prompt_len,
        question_tokens=arguments.gsp_question_len,
        group_output_tokens=arguments.gsp_output_len,
        seed=arguments.seed,
    )
    return make_prompts(spec, vocab_size=vocab, texts=texts, as_text=as_text)


async def _warm_up(
    arguments: argparse.Namespace, target: Target, dialect: Dialect, prompts: list[Prompt], bodies: list[bytes]
) -> None:
    clock = WallClock()
    for index in range(arguments.warmup_requests):
        index %= len(bodies)
        got = await trace_request(target, "POST", dialect.path, bodies[index], clock)
        answer = read_answer(prompts[index], got, native=dialect.native)
        if answer.error:
            raise ConfigError(f"bench: the warm-up request failed: {answer.error}")
    if arguments.flush_cache:
        got = await trace_request(target, "POST", "/flush_cache", b"", clock, s_max=_ASK_S_MAX)
        if got.status != 200:
            raise ConfigError(f"bench: /flush_cache answered {got.status}, expected 200 (an admin key may be needed)")


async def _run(arguments: argparse.Namespace, target: Target, path: str, bodies: list[bytes], load: Load) -> BenchRun:
    with counted("requests", len(bodies), show=not arguments.disable_tqdm) as advance:
        return await drive(target, path, bodies, load, WallClock(), lambda _: advance())


def _about(arguments: argparse.Namespace, url: str, server: _Server, count: int) -> dict[str, Any]:
    rate = arguments.request_rate
    return {
        "backend": arguments.backend,
        "base_url": url,
        "model": server.model,
        "dataset_name": arguments.dataset_name,
        "num_prompts": count,
        "request_rate": "inf" if rate == inf else rate,
        "max_concurrency": arguments.max_concurrency,
        "random_input_len": arguments.random_input_len,
        "random_output_len": arguments.random_output_len,
        "random_range_ratio": arguments.random_range_ratio,
        "seed": arguments.seed,
    }


def _tell(arguments: argparse.Namespace, report: Report, answers: list[BenchAnswer]) -> None:
    print("\n" + result_block(report))
    errors = [answer.error for answer in answers if answer.error]
    for error in sorted(set(errors))[:5]:
        print(f"failed ({errors.count(error)}x): {error}")
    if arguments.plot:
        write_text(arguments.plot, plot_run(answers, report))
    if not arguments.output_file:
        return
    line = report.to_json()
    if arguments.output_details:
        line |= {
            "input_lens": [answer.prompt_tokens for answer in answers],
            "output_lens": [answer.output_tokens for answer in answers],
            "ttfts": [answer.first for answer in answers],
            "itls": [answer.gaps for answer in answers],
            "generated_texts": [answer.text for answer in answers],
            "errors": [answer.error for answer in answers],
        }
    with Path(arguments.output_file).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
