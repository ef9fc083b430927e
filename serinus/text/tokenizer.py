"""Text to token ids and back, and the chat template, of one checkpoint.

Uses the `tokenizers` library directly on `tokenizer.json` (30 ms to load; `AutoTokenizer` imports torch and takes two
seconds); checkpoints without that file go through `AutoTokenizer`, never with remote code.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from serinus.core.clock import Clock, WallClock
from serinus.core.errors import BadRequest, ConfigError
from serinus.core.gguf_file import GGUF_LINK, GgufFile, gguf_folder, is_gguf
from serinus.core.whole_file import write_whole
from serinus.text.chat_template import ChatTemplate
from serinus.text.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer, byte_of_char

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONTEXT_TOKENS = 6
"""Prompt tokens a window detokenizer looks back to."""
_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "additional_chat_templates/*",
    "vocab*",
    "merges.txt",
    "*.tiktoken",
    "config.json",
    "modules.json",
    "*_Pooling/config.json",
]
_SPACE = "\u2581"
"""How SentencePiece writes a space."""
_ANCHOR = "a"
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")
"""How SentencePiece writes a byte of a character that it has no token for."""
_PRE = "tokenizer.ggml.pre"
_BOS_FIRST = ("llama3", "llama-v3", "llama-bpe")
_COUNTED_CHARS = 1 << 18
"""Tokens of a longer text are counted before it is encoded as a whole."""
_PIECE_CHARS = 1 << 16
"""They are counted in pieces of so many characters: the list of ids of each, made with the GIL, is short."""
_IMPORT = threading.Lock()
"""Held to import transformers, which replaces itself in sys.modules: a thread that waits for the import of another one
gets the former module, which has no names."""


class _Encoding(Protocol):
    ids: list[int]


class _Backend(Protocol):
    """The part of `tokenizers.Tokenizer` used here. Calls for a batch let go of the GIL, the others do not."""

    def encode_batch_fast(self, input: list[str], *, add_special_tokens: bool = True) -> list[_Encoding]: ...
    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
    def decode_batch(self, sequences: list[list[int]], skip_special_tokens: bool = True) -> list[str]: ...
    def id_to_token(self, id: int) -> str | None: ...
    def token_to_id(self, token: str) -> int | None: ...
    def get_vocab_size(self, with_added_tokens: bool = True) -> int: ...
    def get_added_tokens_decoder(self) -> dict[int, Any]: ...
    def to_str(self) -> str: ...
    def no_truncation(self) -> None: ...
    def no_padding(self) -> None: ...


class Tokenizer:
    """Encodes, decodes and renders chats; safe to share between threads.

    `texts` are the special tokens by name (`bos_token`...); `template` the source of the chat template, if any,
    `tool_template` that of chats with tools, if it is another.
    """

    def __init__(
        self,
        backend: _Backend,
        *,
        texts: Mapping[str, str],
        template: str = "",
        tool_template: str = "",
        add_bos_token: bool | None = None,
        clock: Clock | None = None,
    ) -> None:
        def made(source: str) -> ChatTemplate | None:
            return ChatTemplate(source, special_tokens=texts, clock=clock or WallClock()) if source else None

        self._backend = backend
        backend.no_truncation()
        backend.no_padding()
        self.texts = dict(texts)
        self.special_ids = frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)
        """Ids left out of the text with skip_special_tokens."""
        self.special_texts = {t.content: i for i, t in backend.get_added_tokens_decoder().items() if t.special}
        """Special tokens: the text of each, and its id."""
        self.added_texts = {token.content: i for i, token in backend.get_added_tokens_decoder().items()}
        """Tokens that were added to the vocabulary, special or not: the text of each, and its id."""
        self.vocab_size = backend.get_vocab_size()
        self.template = made(template)
        self._tool_template = made(tool_template) or self.template
        described = json.loads(self.described)
        self.byte_level = _is_byte_level(described)
        self.token_chars_max = _token_chars_max(described)
        """No token stands for more characters than this (unknown and dropped ones apart)."""
        self._byte_of_char = byte_of_char()
        self._bytes: dict[int, bytes] = {}
        self._bos_id = backend.token_to_id(texts["bos_token"]) if "bos_token" in texts else None
        anchor = backend.encode_batch_fast([_ANCHOR], add_special_tokens=False)[0].ids
        self._anchor = anchor if backend.decode(anchor, False) == _ANCHOR else []
        """Tokens of a text that `token_text` puts another one behind: decoders drop the first space of a text."""
        empty = backend.encode_batch_fast([""])[0].ids
        self._prepend_bos = bool(add_bos_token) and self._bos_id is not None and self._bos_id not in empty
        self._drop_bos = add_bos_token is False and self._bos_id is not None and empty[:1] == [self._bos_id]

    def template_of(self, variables: Mapping[str, Any] | None) -> ChatTemplate | None:
        """The template of a chat with these variables: one with `tools` may have another."""
        return self._tool_template if (variables or {}).get("tools") else self.template

    @property
    def described(self) -> str:
        """All of it, in the form of a tokenizer.json. Cost: 100 ms for 150,000 tokens."""
        return self._backend.to_str()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises BadRequest (surrogates).

        Cost: about 2 us per token without the GIL, 0.04 us with it.
        """
        try:
            ids = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        except (UnicodeEncodeError, TypeError) as err:
            raise BadRequest("text", text, "text that is valid Unicode") from err
        if add_special_tokens and self._prepend_bos and ids[:1] != [self._bos_id]:
            return [cast(int, self._bos_id), *ids]
        if add_special_tokens and self._drop_bos and ids[:1] == [self._bos_id]:
            return ids[1:]
        return ids

    def holds_far_more(self, text: str, token_count: int) -> bool:
        """Whether a text has more than twice so many tokens, within one in a thousand. Raises BadRequest (surrogates).

        Cost: that of encoding about twice so many tokens at most, however long the text is; with the GIL for a few
        milliseconds at a time. A text of less than 262,144 characters is not looked at, and a no.
        """
        if len(text) < _COUNTED_CHARS:
            return False
        count = 0
        for start in range(0, len(text), _PIECE_CHARS):
            count += len(self.encode(text[start : start + _PIECE_CHARS], add_special_tokens=False))
            if count > 2 * token_count:
                return True
        return False

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of these tokens; ids the vocabulary lacks print nothing."""
        return self._backend.decode(token_ids, skip_special_tokens)

    def decode_many(self, lists: list[list[int]], *, skip_special_tokens: bool = True) -> list[str]:
        """The texts of lists of any length; without the GIL, which `decode` keeps."""
        return self._backend.decode_batch(lists, skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token of a byte-level vocabulary; a token with other characters stands for its own text."""
        known = self._bytes.get(token_id)
        if known is not None:
            return known
        token = self._backend.id_to_token(token_id) or ""
        table = self._byte_of_char
        whole = all(char in table for char in token)
        raw = bytes(table[char] for char in token) if whole else token.encode()
        self._bytes[token_id] = raw
        return raw

    def has(self, token_id: int) -> bool:
        """Whether the vocabulary has this id."""
        return self._backend.id_to_token(token_id) is not None

    def token_id(self, text: str) -> int | None:
        """The id of the token with just this text, where it is one."""
        return self._backend.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """One token as it prints within a text: a list of log-probabilities shows it so."""
        if self.byte_level:
            return self.token_bytes(token_id).decode("utf-8", errors="replace")
        text = self._backend.decode([*self._anchor, token_id], False)
        return text[len(_ANCHOR) :] if self._anchor else text

    def token_raw(self, token_id: int) -> bytes:
        """The bytes behind `token_text`, those of a part of a character too: joined they are the text."""
        if self.byte_level:
            return self.token_bytes(token_id)
        text = self.token_text(token_id)
        byte = _BYTE_PIECE.fullmatch(self._backend.id_to_token(token_id) or "")
        return text.encode() if byte is None or text == byte[0] else bytes.fromhex(byte[1])

    def detokenizer(self, *, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for one answer to `prompt`."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        if self.byte_level:
            return ByteDetokenizer(self, skip)
        return WindowDetokenizer(self, skip, context=[int(token_id) for token_id in prompt[-_CONTEXT_TOKENS:]])


def _token_chars_max(described: dict[str, Any]) -> int:
    """`described`: what stands in a tokenizer.json. A vocabulary is a table of tokens, or a list of pairs (Unigram)."""
    vocab = described["model"].get("vocab") or ()
    pieces = vocab if isinstance(vocab, dict) else (pair[0] for pair in vocab)
    added = (token["content"] for token in described.get("added_tokens") or ())
    return max((len(piece) for piece in (*pieces, *added)), default=1)


def _is_byte_level(described: dict[str, Any]) -> bool:
    decoder = described.get("decoder") or {}
    if decoder.get("type") == "Sequence" and len(decoder.get("decoders", ())) == 1:
        decoder = decoder["decoders"][0]
    return bool(decoder.get("type") == "ByteLevel")


def load_tokenizer(
    path: str, *, chat_template: str = "", revision: str | None = None, clock: Clock | None = None
) -> Tokenizer:
    """The tokenizer of a checkpoint: a directory, or a hub id (then `revision`).

    Args:
        chat_template: Jinja source or the path of a file with it; empty = the checkpoint's own.
    Raises:
        ConfigError: no tokenizer there, or one that cannot be read.
    Cost: 30 ms for 32k tokens, 400 ms for 150k; call it in a thread.
    """
    folder = tokenizer_folder(path, revision)
    config = read_json(folder / "tokenizer_config.json")
    template, tool_template = _template_source(folder, config, chat_template)
    texts = special_texts(folder, config)
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
    else:
        backend = _convert_backend(folder)
    add_bos = config.get("add_bos_token")
    return Tokenizer(
        backend, texts=texts, template=template, tool_template=tool_template, add_bos_token=add_bos, clock=clock
    )


def check_template(chat_template: str) -> None:
    """Raise ConfigError where a chat template that is given in place of the checkpoint's own is none, or cannot be
    read: before a model is loaded for it."""
    if chat_template:
        ChatTemplate(_given_source(chat_template), special_tokens={}, clock=WallClock())


def _given_source(chat_template: str) -> str:
    if "{" in chat_template:
        return chat_template
    try:
        return Path(chat_template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # a file that is no UTF-8
        raise ConfigError(
            f"text: chat template {chat_template!r} ({error}), expected a Jinja text or the path of one"
        ) from error


def tokenizer_folder(path: str, revision: str | None) -> Path:
    """The directory of a tokenizer; a hub id is downloaded where it is not cached. Raises ConfigError."""
    folder = gguf_folder(Path(path)) if is_gguf(path) else Path(path)
    if folder.is_dir():
        if (folder / GGUF_LINK).exists() and not (folder / "tokenizer.json").exists():
            _unpack(folder)
        return folder
    if folder.is_absolute() or path.startswith("."):
        raise ConfigError(
            f"text: tokenizer path {path!r} is no directory, expected one with a tokenizer.json, or a file *.gguf"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as err:
        raise ConfigError(f"text: tokenizer {path!r} is neither a directory nor a hub id that answers: {err}") from err


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no file. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as err:
        raise ConfigError(f"text: {file} is no JSON ({err}), expected a JSON object") from err
    if not isinstance(value, dict):
        raise ConfigError(f"text: {file} holds {type(value).__name__}, expected a JSON object")
    return value


def _read_backend(file: Path) -> _Backend:
    from tokenizers import Tokenizer as Backend

    try:
        return cast(_Backend, Backend.from_str(file.read_text(encoding="utf-8")))
    except Exception as err:  # the library raises bare Exception for every bad file
        raise ConfigError(f"text: {file} cannot be read ({err}), expected a tokenizers file") from err


def _unpack(folder: Path) -> None:
    """Write the tokenizer of a GGUF file as its folder's tokenizer.json and tokenizer_config.json, the last one first:
    the other says that both are there. Raises ConfigError: the file has none that transformers knows."""
    file = GgufFile(folder / GGUF_LINK)
    kind, tokens = file.get("tokenizer.ggml.model"), file.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ConfigError(f"text: {file.path.resolve()} has no tokenizer.ggml.tokens, expected a tokenizer in it")
    config: dict[str, Any] = {
        # SentencePiece's vocabularies, and Llama 3's, begin with it where the file does not say.
        "add_bos_token": file.get("tokenizer.ggml.add_bos_token", kind == "llama" or file.get(_PRE) in _BOS_FIRST),
        "chat_template": file.get("tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = file.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and token_id < len(tokens):
            config[f"{name}_token"] = tokens[token_id]
    is_plain = file.architecture == "gemma"  # transformers reads its tokenizer, and not its config
    described = json.loads(_convert_backend(folder, is_plain=is_plain, gguf_file=GGUF_LINK).to_str())
    # Classes of transformers add special tokens of their own: ids that the model has no embedding for.
    described["added_tokens"] = [token for token in described["added_tokens"] if token["id"] < len(tokens)]
    if kind == "llama" and not file.architecture.startswith("gemma"):
        _mark_spaces(described, before=bool(file.get("tokenizer.ggml.add_space_prefix", True)))
    write_whole(folder / "tokenizer_config.json", json.dumps(config).encode())
    write_whole(folder / "tokenizer.json", json.dumps(described).encode())


def _mark_spaces(described: dict[str, Any], *, before: bool) -> None:
    """Make a tokenizer mark spaces as SentencePiece and llama.cpp do: each of them, and one more `before` every text
    and behind every special token, also where there is one already, which transformers' class takes for it."""
    marks: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}]
    spaces: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
    ]  # fmt: skip
    if before:
        marks.insert(0, {"type": "Prepend", "prepend": _SPACE})
        spaces.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    described["normalizer"] = {"type": "Sequence", "normalizers": marks}
    described["pre_tokenizer"] = None
    described["decoder"] = {"type": "Sequence", "decoders": spaces}


def _convert_backend(folder: Path, *, is_plain: bool = False, **given: Any) -> _Backend:
    """A checkpoint with a SentencePiece, tiktoken or GGUF file only; `is_plain`: of no model's class."""
    with _IMPORT:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

    kind = PreTrainedTokenizerFast if is_plain else AutoTokenizer
    try:
        loaded = kind.from_pretrained(str(folder), trust_remote_code=False, **given)
    except (OSError, ValueError, ImportError, KeyError) as err:
        raise ConfigError(f"text: no tokenizer in {folder} ({err}), expected a tokenizer.json") from err
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError(f"text: tokenizer {type(loaded).__name__} of {folder} has no fast form")
    if not backend.encode(_ANCHOR, add_special_tokens=False).ids:  # made of a class alone, without a file
        raise ConfigError(f"text: no tokenizer in {folder} (it has no tokens), expected a tokenizer.json")
    return cast(_Backend, backend)


def special_texts(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; `config`: what stands in tokenizer_config.json."""
    merged = {**read_json(folder / "special_tokens_map.json"), **config}
    texts: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = merged.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            texts[name] = value
    return texts


def _template_source(folder: Path, config: dict[str, Any], chat_template: str) -> tuple[str, str]:
    """The template of chats, and the one of chats with tools where that is another: a checkpoint with several has it by
    the name `tool_use`, as in transformers."""
    if chat_template:
        return _given_source(chat_template), ""
    files = {
        "default": folder / "chat_template.jinja",
        "tool_use": folder / "additional_chat_templates" / "tool_use.jinja",
    }
    named = {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}
    if not named:
        own = config.get("chat_template") or read_json(folder / "chat_template.json").get("chat_template")
        entries = own if isinstance(own, list) else [{"name": "default", "template": own}]
        texts = {str(entry.get("name")): entry.get("template") for entry in entries if isinstance(entry, dict)}
        named = {name: text for name, text in texts.items() if isinstance(text, str)}
    return named.get("default") or next(iter(named.values()), ""), named.get("tool_use", "")
