"""Makes piece_cases.json: a small SentencePiece model, and how the library encodes texts with it.

    pip install sentencepiece; python -m tests.text.piece_cases

A piece is its text, its score, and its type in GGUF (1 normal, 2 unknown, 3 control, 4 defined by the user, 6 a byte).
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from serinus.models.small_checkpoints import _SENTENCES

FILE = Path(__file__).with_suffix(".json")
MARKS = ("<|im_start|>", "<|im_end|>")
TEXTS = (
    "", " ", "   ", "a", " a", "  two spaces", "the canary sings", "The canary sings.", "x  y   z    ", "é", "\n",
    "\n\n a\n", "tabs\tand\ttabs", "12345 67", "金丝雀 🐤 カナリア", "def f(x):\n    return x  # a b\n", "▁marks▁",
    " Der Girlitz zwitschert", "l'aube, d'autres", "zzzzQQ~`", "the the  the", "señala con su canto", "a" * 70,
)  # fmt: skip


def main() -> None:
    """Train a model, encode the texts with it, and write both."""
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*_SENTENCES] * 3), model_writer=made, vocab_size=480, model_type="bpe",
        byte_fallback=True, split_digits=True, character_coverage=0.98, normalization_rule_name="identity",
        remove_extra_whitespaces=False, allow_whitespace_only_pieces=True, pad_id=-1, user_defined_symbols=[*MARKS],
        minloglevel=2,
    )  # fmt: skip
    model = sentencepiece_model_pb2.ModelProto()
    model.ParseFromString(made.getvalue())
    found: dict[str, Any] = {
        "made by": f"sentencepiece {sentencepiece.__version__}",
        "pieces": [[each.piece, each.score, each.type] for each in model.pieces],
        "texts": TEXTS,
    }
    for before in (True, False):
        model.normalizer_spec.add_dummy_prefix = before
        encoder = sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())
        found["ids with a space before" if before else "ids without"] = [encoder.encode(text) for text in TEXTS]
    FILE.write_text(json.dumps(found, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
