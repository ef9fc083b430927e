"""The lean tokenizer says what AutoTokenizer says, and refuses what is none."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from serinus.core.clock import ManualClock, WallClock
from serinus.core.errors import BadRequest, ConfigError
from serinus.testing.small_tokenizers import make_byte_tokenizer, make_piece_tokenizer
from serinus.text import ChatTemplate, Tokenizer, load_tokenizer

TEXTS = ["hello the world", " the abc ", "日本語 🙂 é", "<eos>x<think>", "", "a\n\n\tb", "日本 語"]
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hello <b>the</b> world"},
    {"role": "assistant", "content": "ab"},
    {"role": "user", "content": "🙂?"},
]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ids_texts_and_chats_equal_those_of_transformers(byte_folder: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(str(byte_folder)), load_tokenizer(str(byte_folder))
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)
    assert ours.template is not None
    for prompt in (True, False):
        rendered = theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=prompt)
        assert ours.template.render(CHAT, add_generation_prompt=prompt) == rendered
    continued = theirs.apply_chat_template(CHAT[:3], tokenize=False, continue_final_message=True)
    assert ours.template.render(CHAT[:3], continue_final_message=True) == continued


@pytest.mark.slow
def test_neither_front_nor_tokenizer_imports_torch(byte_folder: Path) -> None:
    code = (
        "import sys, serinus.front.app, serinus.front.router, serinus.front.server;"
        f"from serinus.text import load_tokenizer; t = load_tokenizer({str(byte_folder)!r});"
        "t.template.render([{'role': 'user', 'content': 'x'}]);"
        "print([m for m in ('torch', 'transformers', 'httpx', 'numba') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_two_threads_that_are_the_first_to_need_transformers_both_load_a_tokenizer(
    byte_folder: Path, tmp_path: Path
) -> None:
    model = json.loads((byte_folder / "tokenizer.json").read_text())["model"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    code = (
        "from concurrent.futures import ThreadPoolExecutor; from serinus.text import load_tokenizer;"
        f"made = ThreadPoolExecutor(2).map(load_tokenizer, [{str(tmp_path)!r}] * 2);"
        "print([len(each.encode(' the')) for each in made])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[1, 1]", done.stderr


def test_the_start_token_is_added_where_the_settings_say_so(piece_folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(piece_folder))
    plain = tokenizer.encode("the", add_special_tokens=False)
    assert tokenizer.encode("the") == [1, *plain]
    assert tokenizer.encode("<s>the")[:2] != [1, 1]
    folder = shutil.copytree(piece_folder, tmp_path / "plain")
    (folder / "tokenizer_config.json").write_text("{}")
    assert load_tokenizer(str(folder)).encode("the") == plain


def test_a_token_shows_its_text_and_its_bytes(byte_folder: Path) -> None:
    tokenizer = load_tokenizer(str(byte_folder))
    the = tokenizer.encode(" the")[0]
    assert (tokenizer.token_text(the), tokenizer.token_raw(the)) == (" the", b" the")
    assert (tokenizer.token_text(0xF0), tokenizer.token_raw(0xF0)) == ("\ufffd", b"\xf0")
    assert tokenizer.token_raw(tokenizer.encode("<eos>")[0]) == b"<eos>"


def test_tokens_of_a_sentence_piece_vocabulary_keep_their_spaces_and_join_to_the_text(piece_folder: Path) -> None:
    tokenizer = load_tokenizer(str(piece_folder))
    text = " the b ab 日本é!🙂"
    before, ids = (tokenizer.encode(each, add_special_tokens=False) for each in ("a", "a" + text))
    ids = ids[len(before) :]
    assert b"".join(tokenizer.token_raw(each) for each in ids) == text.encode()
    names = {name: tokenizer.token_text(tokenizer.token_id(name) or 0) for name in ("▁", "▁b", "b", "<0xE9>", "</s>")}
    assert names == {"▁": " ", "▁b": " b", "b": "b", "<0xE9>": "\ufffd", "</s>": "</s>"}


def test_text_that_is_no_unicode_is_refused(byte_folder: Path) -> None:
    with pytest.raises(BadRequest, match="valid Unicode"):
        load_tokenizer(str(byte_folder)).encode("a\ud800")


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", "{", "cannot be read"),
        ("tokenizer.json", '{"model": 3}', "cannot be read"),
        ("tokenizer_config.json", "[", "is no JSON"),
        ("tokenizer_config.json", "[]", "expected a JSON object"),
    ],
)
def test_a_broken_tokenizer_file_is_named(
    byte_folder: Path, tmp_path: Path, file: str, content: str, said: str
) -> None:
    folder = shutil.copytree(byte_folder, tmp_path / "broken")
    (folder / file).write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        load_tokenizer(str(folder))
    assert file in str(caught.value)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no directory"):
        load_tokenizer(str(tmp_path / "nothing"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", ["", '{"model_type": "qwen2"}'])
def test_a_directory_without_a_tokenizer_is_refused(tmp_path: Path, config: str) -> None:
    """By its model's class alone transformers makes a tokenizer without tokens."""
    if config:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ConfigError, match=r"expected a tokenizer\.json"):
        load_tokenizer(str(tmp_path))


def test_the_chat_template_comes_from_the_settings_a_file_or_the_checkpoint(byte_folder: Path, tmp_path: Path) -> None:
    given = load_tokenizer(str(byte_folder), chat_template="{{ messages[0]['content'] }}!")
    assert given.template is not None
    assert given.template.render([{"role": "user", "content": "x"}]) == "x!"
    file = tmp_path / "t.jinja"
    file.write_text("{{ eos_token }}")
    read = load_tokenizer(str(byte_folder), chat_template=str(file))
    assert read.template is not None
    assert read.template.render([{"role": "user", "content": "x"}]) == "<eos>"
    with pytest.raises(ConfigError, match="chat template"):
        load_tokenizer(str(byte_folder), chat_template="nowhere.jinja")
    with pytest.raises(ConfigError, match="line 1"):
        load_tokenizer(str(byte_folder), chat_template="{% if %}")
    folder = shutil.copytree(byte_folder, tmp_path / "named")
    named = [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    several = load_tokenizer(str(folder))
    assert several.template is not None
    assert several.template.source == "D"
    (folder / "chat_template.jinja").write_text("J")
    beside = load_tokenizer(str(folder))
    assert beside.template is not None
    assert beside.template.source == "J"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["config", "files"])
def test_chats_with_tools_have_the_template_of_that_name(form: str, byte_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder = shutil.copytree(byte_folder, tmp_path / "named")
    templates = {"default": "D", "tool_use": "T"}
    if form == "config":
        named = [{"name": name, "template": source} for name, source in templates.items()]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    else:
        (folder / "chat_template.jinja").write_text(templates["default"])
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(templates["tool_use"])
    tokenizer, theirs = load_tokenizer(str(folder)), AutoTokenizer.from_pretrained(str(folder))
    messages = [{"role": "user", "content": "x"}]
    for tools in (None, [], [{"type": "function", "function": {"name": "f"}}]):
        template = tokenizer.template_of({"tools": tools})
        assert template is not None
        assert template.render(messages) == theirs.apply_chat_template(messages, tools=tools or None, tokenize=False)
    given = load_tokenizer(str(folder), chat_template="{{ 'G' }}").template_of({"tools": [1]})
    assert given is not None
    assert given.render(messages) == "G"


def test_a_template_may_refuse_a_conversation_but_not_reach_out() -> None:
    source = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}ok"
    template = ChatTemplate(source, special_tokens={}, clock=ManualClock())
    assert template.render([{"role": "user", "content": ""}]) == "ok"
    with pytest.raises(BadRequest, match="roles must alternate"):
        template.render([{"role": "system", "content": ""}])
    escape = ChatTemplate("{{ messages.__class__.__mro__ }}", special_tokens={}, clock=ManualClock())
    with pytest.raises(BadRequest, match="messages"):
        escape.render([{"role": "user", "content": ""}])


def test_a_template_knows_the_date_and_the_json_of_things() -> None:
    source = "{{ strftime_now('%Y') }} {{ messages[0].content | tojson }}{% generation %} x{% endgeneration %}"
    template = ChatTemplate(source, special_tokens={}, clock=ManualClock())
    assert template.render([{"role": "user", "content": "<é>"}]) == '2023 "<é>" x'


def test_other_threads_run_while_a_long_text_is_tokenized(tokenizer: Tokenizer) -> None:
    clock, text = WallClock(), "hello the abc " * 40_000
    shares: list[float] = []
    while not shares or (shares[-1] >= 0.5 and len(shares) < 10):  # a busy machine may keep the thread waiting too
        done, times = threading.Event(), [0.0]

        def look(done: threading.Event = done, times: list[float] = times) -> None:
            while not done.wait(0.001):
                times.append(clock.now())

        thread = threading.Thread(target=look)
        thread.start()
        begin = clock.now()
        ids = tokenizer.encode(text)
        end = clock.now()
        done.set()
        thread.join()
        times = [begin, *(time for time in times if begin < time < end), end]
        shares.append(max(after - before for before, after in pairwise(times)) / (end - begin))
    assert shares[-1] < 0.5, shares  # 0.03 here; always 0.95 with the call that keeps the GIL
    assert tokenizer.decode_many([ids, ids[:1]]) == [text, tokenizer.decode(ids[:1])]


@pytest.mark.parametrize("make", [make_byte_tokenizer, make_piece_tokenizer])
def test_no_token_stands_for_more_characters_than_the_longest(make: Callable[[Path], Path], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(make(tmp_path)))
    lengths = [len(tokenizer.decode([i], skip_special_tokens=False)) for i in range(tokenizer.vocab_size)]
    assert max(lengths) <= tokenizer.token_chars_max <= max(lengths) + 4


def test_far_too_many_tokens_are_noticed_early(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    encode = Tokenizer.encode

    def noted(self: Tokenizer, text: str, *, add_special_tokens: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(self, text, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", noted)
    text = "!" * (1 << 20)
    assert tokenizer.holds_far_more(text, 1000)
    assert sum(seen) == 1 << 16
    assert tokenizer.holds_far_more(text, 500_000)
    assert not tokenizer.holds_far_more(text, 1 << 20)
