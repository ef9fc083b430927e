"""Small tokenizers made on the spot, one of each kind, in the files a checkpoint has."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from serinus.text import byte_of_char

CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_byte_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer of 300 tokens: 256 bytes, some merges, two special tokens, one plain added token."""
    chars = sorted(byte_of_char(), key=byte_of_char().__getitem__)
    vocab = {char: index for index, char in enumerate(chars)}
    merges: list[tuple[str, str]] = []
    for left, right in [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "b"), ("ab", "c"), ("ð", "Ł"), ("l", "l")]:
        merges.append((left, right))
        vocab[left + right] = len(vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<pad>", special=True)])
    backend.add_tokens([AddedToken("<think>", special=False), AddedToken("日本 語", special=False)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<eos>",
        "pad_token": {"__type": "AddedToken", "content": "<pad>", "special": True},
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def make_piece_tokenizer(folder: Path) -> Path:
    """A SentencePiece-style tokenizer: a mark for spaces, byte fallback, the first space dropped."""
    words = ["▁the", "▁a", "▁", "t", "h", "e", "a", "b", "ab", "▁b", "日", "本", "!"]
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for word in words:
        vocab[word] = len(vocab)
    merges = [("a", "b")]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(Regex("▁"), " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
