"""`serinus batch`: requests in OpenAI's batch form, answered by a running server or by an engine of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serinus.cli import main
from serinus.cli.batch_file import BadLine, BatchLine, answer_line, done_before, lines_of
from serinus.core.errors import ConfigError
from serinus.models.small_checkpoints import make_toy
from serinus.testing.fake_engine import FakeEngine
from serinus.testing.running_front import RunningFront, front_settings, running_front
from serinus.testing.small_tokenizers import make_byte_tokenizer
from serinus.wire.messages import Generate


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningFront]:
    folder = tmp_path_factory.mktemp("front")
    engine = FakeEngine(endpoint=f"ipc://{folder}/engine", vocab_size=267, context_length=256)
    path = make_byte_tokenizer(tmp_path_factory.mktemp("byte"))
    settings = front_settings(model_path=str(path), served_model_name="canary", engine="fake-0", api_key="k")
    with running_front(settings, engine) as running:
        yield running


def ask(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": "canary", "messages": [{"role": "user", "content": custom_id}], "max_tokens": 3}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines) + "\n")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(front: RunningFront, given: Path, out: Path, *more: str) -> int:
    words = ["batch", "--url", front.url, "--api-key", "k", "-i", str(given), "-o", str(out)]
    return main([*words, "--max-concurrency", "4", *more])


@pytest.mark.slow
def test_every_request_is_answered_in_openais_form(
    front: RunningFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = {"model": "canary", "prompt": "once", "max_tokens": 2}
    asked = [ask(f"chat-{number}") for number in range(9)] + [ask("text", url="/v1/completions", body=text)]
    out = tmp_path / "out.jsonl"
    assert batch(front, write(tmp_path / "in.jsonl", *asked), out) == 0
    found = {row["custom_id"]: row for row in rows(out)}
    assert sorted(found) == sorted(each["custom_id"] for each in asked)
    for row in found.values():
        assert sorted(row) == ["custom_id", "error", "id", "response"]
        assert (row["id"][:10], row["error"], row["response"]["status_code"]) == ("batch_req_", None, 200)
        assert row["response"]["request_id"]
    assert found["text"]["response"]["body"]["object"] == "text_completion"
    assert found["chat-3"]["response"]["body"]["usage"]["completion_tokens"] == 3
    assert (
        "batch: 10 answered, 0 answered with an error, 0 had an answer already, 0 bad lines" in capsys.readouterr().out
    )


@pytest.mark.slow
def test_a_run_goes_on_where_the_one_before_was_ended(front: RunningFront, tmp_path: Path) -> None:
    given, out = write(tmp_path / "in.jsonl", *(ask(f"{number}") for number in range(6))), tmp_path / "out.jsonl"
    assert batch(front, given, out) == 0
    whole = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(whole[:3]) + whole[3][:20])  # it was killed while it wrote
    before = len(front.engine.of(Generate))
    assert batch(front, given, out) == 0
    assert len(front.engine.of(Generate)) == before + 3
    assert sorted(row["custom_id"] for row in rows(out)) == [f"{number}" for number in range(6)]
    assert out.read_bytes().splitlines(keepends=True)[:3] == whole[:3]
    assert batch(front, given, out) == 0
    assert len(front.engine.of(Generate)) == before + 3


@pytest.mark.slow
def test_bad_lines_and_refused_requests_are_told_and_not_lost(
    front: RunningFront, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ask("wrong", body={"model": "canary", "messages": "hello"})
    given = write(tmp_path / "in.jsonl", ask("a"), "{no json", "", ask("b", method="GET"), wrong, ask("a"))
    out = tmp_path / "out.jsonl"
    for _ in range(2):
        assert batch(front, given, out) == 1
        told = capsys.readouterr().err
        for said in ("line 2: no JSON", "line 4: method: got 'GET', expected POST", "line 6: custom_id: got 'a'"):
            assert said in told
        found = rows(out)
        assert len(found) == 5, "a second run repeats nothing"
    errors = {row["error"]["line"]: row for row in found if row["error"]}
    assert sorted(errors) == [2, 4, 6]
    assert (errors[4]["custom_id"], errors[4]["response"], errors[4]["error"]["code"]) == ("b", None, "invalid_line")
    (refused,) = (row["response"] for row in found if row["custom_id"] == "wrong")
    assert refused["status_code"] == 400
    assert "messages" in refused["body"]["error"]["message"]
    given.write_text(given.read_text().replace("GET", "POST"))
    assert batch(front, given, out) == 1
    assert rows(out)[-1]["custom_id"] == "b", "a line that was mended is asked"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[]", "a JSON list, expected an object"),
        ({"method": "POST"}, "custom_id: got None, expected a text"),
        (ask("x\ud800"), r"custom_id: got 'x\ud800', expected a text that is valid Unicode"),
        (ask("x", url="/v1/embeddings"), "url: got '/v1/embeddings', expected one of /v1/chat/completions"),
        (ask("x", body=[]), "body: got [], expected an object"),
        (ask("x", body={"stream": True}), "body.stream: got True, expected false"),
        (ask("x", url=["y"]), "url: got"),
    ],
)
def test_a_line_that_is_no_request_says_why(tmp_path: Path, line: Any, said: str) -> None:
    (found,) = lines_of(str(write(tmp_path / "in.jsonl", line)))
    assert isinstance(found, BadLine)
    assert said in found.reason


def test_half_a_character_in_an_answer_is_written_as_it_came(tmp_path: Path) -> None:
    (found,) = lines_of(str(write(tmp_path / "in.jsonl", ask("x"))))
    assert isinstance(found, BatchLine)
    row = json.loads(answer_line(found, 200, "", rb'{"text": "\ud800"}'))
    assert row["response"]["body"] == {"text": "\ud800"}


def test_a_line_of_an_answer_is_one_line_for_every_reader(tmp_path: Path) -> None:
    """Those of Python's str.splitlines end lines at more than JSON escapes."""
    (found,) = lines_of(str(write(tmp_path / "in.jsonl", ask("x"))))
    assert isinstance(found, BatchLine)
    text = "".join(map(chr, range(0x3000))) + "é\n"
    line = answer_line(found, 200, "", json.dumps({"text": text}).encode()).decode()
    assert line.splitlines() == [line[:-1]]
    assert json.loads(line)["response"]["body"] == {"text": text}
    assert "é" in line


def test_lines_are_counted_as_editors_do_and_bodies_stay_as_they_are(tmp_path: Path) -> None:
    found = list(lines_of(str(write(tmp_path / "in.jsonl", "", ask("a"), "   ", ask("ä")))))
    assert [(line.number, line.custom_id) for line in found] == [(2, "a"), (4, "ä")]
    assert all(isinstance(line, BatchLine) and json.loads(line.body) == ask(line.custom_id)["body"] for line in found)


def test_a_file_that_is_no_output_of_a_batch_is_left_alone(tmp_path: Path) -> None:
    other = write(tmp_path / "notes.txt", "my notes")
    with pytest.raises(ConfigError, match=r"line 1 of .* is no answer of a batch"):
        done_before(str(other))
    assert other.read_text() == "my notes\n"
    assert done_before(str(tmp_path / "none")) == (set(), set())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-i", "a"], "a file is missing, expected both"),
        (["-i", "a", "-o", "./a", "--url", "http://h:1"], "-i and -o are both"),
        (["-i", "a", "-o", "b"], "expected either a model"),
        (["model", "-i", "a", "-o", "b", "--url", "http://h:1"], "expected either a model"),
        (["-i", "a", "-o", "b", "--url", "http://h:1", "--max-concurrency", "0"], "expected at least 1"),
        (["-i", "nowhere", "-o", "b", "--url", "http://h:1"], "cannot read nowhere"),
        (["-i", "/dev/null", "-o", "none/b", "--url", "http://h:1"], "batch: cannot write none/b: none is no folder"),
    ],
)
def test_wrong_command_lines_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["batch", *words]) == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "key", "said"), [("http://127.0.0.1:1", "k", "no answer at"), ("", "x", "answered 401")]
)
def test_a_server_that_does_not_answer_is_said_before_anything_is_written(
    front: RunningFront, tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str, key: str, said: str
) -> None:
    given, out = write(tmp_path / "in.jsonl", ask("a")), tmp_path / "out.jsonl"
    assert main(["batch", "--url", url or front.url, "--api-key", key, "-i", str(given), "-o", str(out)]) == 2
    assert said in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.slow
def test_a_server_that_is_lost_ends_the_run_and_what_has_no_answer_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, front: RunningFront
) -> None:
    monkeypatch.setattr("serinus.cli.batch_run._PAUSE_S", 0.001)
    given, out = write(tmp_path / "in.jsonl", ask("a"), ask("b")), tmp_path / "out.jsonl"
    engine = FakeEngine(endpoint=f"ipc://{tmp_path}/e", vocab_size=267, breaks="it broke")
    settings = front_settings(model_path=front.app.state.front.settings.model.model_path, served_model_name="canary")
    with running_front(settings, engine) as broken:
        assert main(["batch", "--url", broken.url, "-i", str(given), "-o", str(out)]) == 1
    assert "has no answer: it answered 503" in capsys.readouterr().err
    assert out.read_text() == ""


@pytest.mark.proof
def test_an_engine_of_its_own_answers_and_ends_with_the_run(tmp_path: Path) -> None:
    model = make_toy(tmp_path / "toy")
    body = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}
    asked = [ask(f"{number}", url="/v1/completions", body=body) for number in range(5)]
    given, out = write(tmp_path / "in.jsonl", *asked), tmp_path / "out.jsonl"
    assert main(["batch", str(model), "-i", str(given), "-o", str(out), "--max-total-tokens", "1024"]) == 0
    assert {row["response"]["status_code"] for row in rows(out)} == {200}
    assert len(rows(out)) == 5
    assert main(["batch", str(tmp_path / "none"), "-i", str(given), "-o", str(tmp_path / "other.jsonl")]) == 2
