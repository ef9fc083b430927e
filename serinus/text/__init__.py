"""text: tokenizer, detokenizer, chat templates and stop texts of a checkpoint, and the growth of one answer.

    tokenizer = load_tokenizer(path)
    output = OutputProcessor(tokenizer, sampling, prompt_ids)   # one for each answer
    piece = output.feed(token_ids, finish)                      # its new text

Used by the HTTP front and by the offline `LLM`. Torch-free; the libraries behind it are loaded when first needed.
"""

from serinus.text.answer import (
    AnswerDelta,
    AnswerParser,
    DeltaKind,
    PlainAnswer,
    ToolCall,
    WholeAnswer,
    answer_of,
    parts_of,
)
from serinus.text.answer_style import AnswerStyle, answer_style
from serinus.text.chat_template import ChatTemplate
from serinus.text.detokenizer import Detokenizer, byte_of_char
from serinus.text.embedding import EmbeddingUse, load_embedding_use
from serinus.text.forced_calls import forced_tag
from serinus.text.generation import GenerationConfig, load_generation_config, tokenizer_eos_ids
from serinus.text.grammar_source import grammar_rules
from serinus.text.grammars import GrammarCompiler, GrammarFailed, GrammarState, GrammarVocabulary
from serinus.text.messages import call_arguments, checked_messages
from serinus.text.output import OutputProcessor
from serinus.text.reasoning import ReasoningFormat
from serinus.text.stops import StopTexts
from serinus.text.tokenizer import Tokenizer, check_template, load_tokenizer

__all__ = [
    "AnswerDelta",
    "AnswerParser",
    "AnswerStyle",
    "ChatTemplate",
    "DeltaKind",
    "Detokenizer",
    "EmbeddingUse",
    "GenerationConfig",
    "GrammarCompiler",
    "GrammarFailed",
    "GrammarState",
    "GrammarVocabulary",
    "OutputProcessor",
    "PlainAnswer",
    "ReasoningFormat",
    "StopTexts",
    "Tokenizer",
    "ToolCall",
    "WholeAnswer",
    "answer_of",
    "answer_style",
    "byte_of_char",
    "call_arguments",
    "check_template",
    "checked_messages",
    "forced_tag",
    "grammar_rules",
    "load_embedding_use",
    "load_generation_config",
    "load_tokenizer",
    "parts_of",
    "tokenizer_eos_ids",
]
