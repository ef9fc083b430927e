"""LLM: one engine inside this process, without HTTP. `from serinus import LLM, SamplingParams`."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serinus.core.clock import WallClock
from serinus.core.config import ServeConfig, from_names
from serinus.core.errors import BadRequest, CapacityError, InvariantError
from serinus.core.grammar import Grammar
from serinus.core.ids import new_incarnation, new_rid
from serinus.core.request import FinishReason, KvIntegrity, Request, TokenDelta, TokenLogprobs, Usage
from serinus.core.rng import Rng, choice_seed
from serinus.core.sampling import SamplingParams
from serinus.engine.build import build_engine
from serinus.engine.interrupt import Interrupt
from serinus.engine.messages import FrontMessage, TurnOutput
from serinus.engine.progress import Progress
from serinus.engine.prompts import GivenPrompt, Prompt, given_prompts
from serinus.ranks.tier_parts import pause
from serinus.text import GrammarCompiler, OutputProcessor, Tokenizer, check_template, checked_messages, load_tokenizer
from serinus.wire.messages import Abort

_FRONT = "llm"
"""The front's name in its messages to the engine."""
_PAUSE_S = 0.001
_TAIL_TOKENS = 16
"""Tokens of a prompt that a detokenizer may look at: the last ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to a prompt."""

    index: int
    """0 .. n - 1 among the answers to its prompt."""
    text: str
    """The answer; empty where no tokenizer was loaded."""
    token_ids: tuple[int, ...]
    """Its tokens, the one that ended it included."""
    finish_reason: str
    """stop, length, abort or error."""
    stop_reason: int | str | None
    """The token id or the text that ended it, where one did."""
    logprobs: tuple[TokenLogprobs, ...]
    """One per token where asked for."""
    kv_integrity: KvIntegrity | None = field(default=None, compare=False)
    """What the canary verified of the KV that it was computed on; None without one (kv_canary="none")."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """The answers to one prompt, in the order of the prompts."""

    prompt: str | None
    """The text, where it was one."""
    prompt_token_ids: tuple[int, ...]
    """Tokens of the prompt."""
    prompt_logprobs: tuple[TokenLogprobs, ...]
    """One per prompt token where asked for."""
    outputs: tuple[CompletionOutput, ...]
    """As many answers as `n` asked for."""
    usage: Usage | None
    """Of the first answer: cached tokens, retractions, seconds."""


class _Answer:
    """One sequence while it grows."""

    def __init__(self, processor: OutputProcessor) -> None:
        self.processor = processor
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.usage: Usage | None = None
        self.closing = False
        """A stop text ended it; the engine's last delta, with its receipt, is awaited."""

    def take(self, delta: TokenDelta) -> tuple[int, bool]:
        """Feed one delta; returns how many tokens counted, and whether a stop text ended it here."""
        if delta.prompt_logprobs:
            self.prompt_logprobs = delta.prompt_logprobs
        if delta.usage is not None:
            self.usage = delta.usage
        if self.closing:
            if delta.finish is FinishReason.ERROR:
                self.processor.finish, self.processor.matched = delta.finish, None
            return 0, False
        piece = self.processor.feed(delta.token_ids, delta.finish, delta.matched_stop)
        self.logprobs.extend(delta.logprobs[: piece.token_count])
        return piece.token_count, piece.stopped_here


class LLM:
    """Loads a checkpoint and continues prompts.

    Args:
        model: directory of a checkpoint, or a hub id.
        settings: any setting of `serinus serve` by its name, e.g. dtype="float32", max_total_tokens=8192,
            page_size=32, random_seed=1 (docs/settings.md).
    Raises:
        ConfigError: the checkpoint or a setting is wrong.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        offline = {"max_step_ms": 0.0}  # no client waits for the next token of a stream
        config = from_names(ServeConfig, {"model_path": str(model), **offline, **settings})
        clock = WallClock()
        self._clock = clock
        check_template(config.model.chat_template)
        built = build_engine(config, clock)
        self._built = built
        self._engine = built.engine
        self._end = weakref.finalize(self, built.close)  # no ranks and no folder outlive an LLM or its process
        self._turns = threading.RLock()
        """Held by the thread whose call this is; a handler of a signal may close the LLM within one."""
        self._generates = False
        self.spec = built.spec
        """What the model is."""
        self.config = built.config
        """The settings in force."""
        self.tokenizer: Tokenizer | None = None
        """None with skip_tokenizer_init: prompts are token ids then, and answers have no text."""
        if not config.model.skip_tokenizer_init:
            path = config.model.tokenizer_path or built.spec.path
            template = config.model.chat_template
            with ExitStack() as undo:
                undo.callback(self.close)
                self.tokenizer = load_tokenizer(path, chat_template=template, revision=config.model.revision)
                undo.pop_all()
        self._grammars: GrammarCompiler | None = None
        seed = config.model.random_seed
        self._rng = Rng(new_incarnation() if seed is None else seed)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue prompts, all in one batch. Of several threads one waits for the other: to batch what comes at any
        time, serve over HTTP.

        Args:
            prompts: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids} (vLLM's TextPrompt and
                TokensPrompt; `cache_salt` may stand beside), or a list of these, of any length.
            sampling_params: for all prompts, or one for each; None = `get_default_sampling_params()`. Those given are
                taken as they are, as vLLM does: what they do not name is not filled in from the checkpoint.
            use_tqdm: show a progress bar on a terminal (the name users of vLLM know).
        Returns: one RequestOutput per prompt, in order.
        Raises:
            BadRequest: a prompt or a parameter cannot be served; nothing was started.
            CapacityError: it was called within a call, by a handler of a signal.
            KeyboardInterrupt: Ctrl-C came; raised after the step that runs, and nothing of the call is left. A second
                one does not wait for the step, and the LLM cannot be used any more.
            PeerGone: a rank was lost, Ctrl-C came twice, an exception from outside (of a handler of a signal) came
                within a step, or the LLM was closed: make a new one.
        """
        with self._turns:
            self._check_alone()
            self._generates = True
            try:
                return self._generate(prompts, sampling_params, use_tqdm)
            finally:
                self._generates = False

    def _generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:  # fmt: skip
        self._built.line.check()
        given = given_prompts(prompts)
        wanted = self.get_default_sampling_params() if sampling_params is None else sampling_params
        params = _as_params(wanted, len(given))
        rows = [self._encode(prompt) for prompt in given]
        answers, requests = self._requests(given, rows, params)
        self._run(requests, use_tqdm)
        return [
            RequestOutput(
                prompt=prompt.text,
                prompt_token_ids=tuple(row.tolist()),
                prompt_logprobs=group[0].prompt_logprobs,
                outputs=tuple(_completion(index, answer) for index, answer in enumerate(group)),
                usage=group[0].usage,
            )
            for prompt, row, group in zip(given, rows, answers, strict=True)
        ]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the checkpoint's chat template.

        Args:
            messages: dicts with `role` and `content` (a text, or a list of parts of type text), or lists of those.
            add_generation_prompt: as /v1/chat/completions has it, like the two that follow.
            continue_final_message: the last message is gone on with.
            chat_template_kwargs: more names for the template.
        Raises BadRequest: no messages, or none that the template takes; no chat template; or see `generate`.
        """
        tokenizer = self.tokenizer
        template = None if tokenizer is None else tokenizer.template_of(chat_template_kwargs)
        if tokenizer is None or template is None:
            raise BadRequest("messages", "a chat", "a checkpoint whose tokenizer has a chat template")
        if not isinstance(messages, (list, tuple)) or not messages:
            raise BadRequest("messages", messages, "a list of messages, or a list of such lists, at least one")
        several = isinstance(messages[0], (list, tuple))
        chats: Sequence[Any] = messages if several else [messages]
        texts = [
            template.render(
                checked_messages(chat, template.source),
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                extra=chat_template_kwargs,
            )
            for chat in chats
        ]
        prompts = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """Those that the checkpoint's generation_config.json names (setting generation_config), and ours for others."""
        return SamplingParams(**self._built.generation.defaults)  # type: ignore[arg-type]

    def close(self) -> None:
        """End its ranks and the threads of its tiers, where there are any; storage writes under way get some seconds.
        Happens by itself when the LLM is dropped or the process ends. Waits for a call of another thread; may be called
        again, also where it was interrupted."""
        with self._turns:
            self._built.close()
            self._end.detach()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def flush_cache(self) -> None:
        """Forget all cached prefixes, on device and host; what is stored stays. Waits for a call of another thread.
        Raises CapacityError: it was called within a call; PeerGone: the LLM was closed, or broke."""
        with self._turns:
            self._check_alone()
            self._built.line.check()
            self._built.cache.reset()

    def _encode(self, prompt: GivenPrompt) -> NDArray[np.int32]:
        if prompt.ids is not None:
            for token_id in (int(prompt.ids.min()), int(prompt.ids.max())):
                if not 0 <= token_id < self.spec.vocab_size:
                    raise BadRequest("prompts", token_id, f"token ids from 0 to {self.spec.vocab_size - 1}")
            return prompt.ids.astype(np.int32)
        assert prompt.text is not None, "engine: a prompt without text and ids"
        if self.tokenizer is None:
            raise BadRequest("prompts", prompt.text, "token ids, as no tokenizer is loaded (skip_tokenizer_init)")
        return np.asarray(self.tokenizer.encode(prompt.text), np.int32)

    def _requests(
        self, given: list[GivenPrompt], rows: list[NDArray[np.int32]], params: list[SamplingParams]
    ) -> tuple[list[list[_Answer]], list[tuple[Request, _Answer]]]:
        """A request for each sequence. Raises BadRequest: one of them could never be served."""
        answers: list[list[_Answer]] = []
        requests: list[tuple[Request, _Answer]] = []
        for grammar in {each.grammar for each in params if each.grammar is not None}:
            self._check_grammar(grammar)
        for prompt, row, wanted in zip(given, rows, params, strict=True):
            group: list[_Answer] = []
            alone = replace(wanted, n=1)
            seed = self._rng.getrandbits(63) if wanted.seed is None else wanted.seed
            for index in range(wanted.n):
                request = Request(
                    rid=new_rid("llm"),
                    prompt=row,
                    sampling=alone,
                    seed=choice_seed(seed, index),
                    cache_salt=prompt.cache_salt,
                    arrival=self._clock.now(),
                )
                self._engine.check(request)
                group.append(_Answer(OutputProcessor(self.tokenizer, wanted, row[-_TAIL_TOKENS:].tolist())))
                requests.append((request, group[-1]))
            answers.append(group)
        return answers, requests

    def _check_grammar(self, grammar: Grammar) -> None:
        """Raises BadRequest: it cannot be compiled, or there is no tokenizer."""
        if self.config.model.grammar_backend == "none":
            raise BadRequest("grammar", grammar.text, "nothing, as grammar_backend is none")
        if self.tokenizer is None:
            raise BadRequest("grammar", grammar.text, "nothing, as no tokenizer is loaded (skip_tokenizer_init)")
        if self._grammars is None:
            spec = self.spec
            self._grammars = GrammarCompiler(self.tokenizer, width=spec.vocab_size, eos_ids=spec.eos_ids)
        self._grammars.compile(grammar)

    def _run(self, requests: list[tuple[Request, _Answer]], show: bool) -> None:
        """Turn until every sequence ended, or Ctrl-C came; whatever happens, none is left behind.

        No more requests are in the engine at once than may wait there: any number of prompts can be given.
        """
        engine, room = self._engine, self.config.sched.max_queued_requests
        waiting = deque(requests)
        owners: dict[str, _Answer] = {}
        with Progress("Processed prompts", total=len(requests), show=show) as progress, Interrupt() as interrupt:
            try:
                messages: list[FrontMessage] = []
                while (waiting or owners) and not interrupt.came:
                    while waiting and len(owners) < room:
                        request, answer = waiting.popleft()
                        owners[request.rid] = answer
                        messages.append(FrontMessage(front=_FRONT, message=request))
                    asked, messages = messages, []
                    output = self._turn(asked, partial(_take, owners, progress, messages))
                    if not messages and not output.deltas and engine.stalled:
                        raise InvariantError(f"engine: {len(owners)} requests wait and none can run, expected a step")
                    self._wait()
                with self._unbroken():
                    for rid in owners:
                        engine.drop(rid, "interrupted")
                while messages or not engine.idle:
                    self._turn(messages)
                    messages = []
                    self._wait()
            finally:
                if self._built.line.sound:  # else nothing is known of what the engine holds
                    with self._unbroken():
                        for rid in owners:
                            engine.drop(rid, "the call ended early")

    def _turn(
        self, messages: Sequence[FrontMessage], take: Callable[[TurnOutput], object] = lambda output: None
    ) -> TurnOutput:
        """One turn of the engine, and the work that it gave to the ranks; meanwhile `take` gets the output."""
        with self._unbroken():
            output = self._built.turn(messages)
            self._built.line.flush(lambda: take(output))
        return output

    def _check_alone(self) -> None:
        if self._generates:
            raise CapacityError("engine: a call of generate is under way in this thread, expected none")

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Whatever is raised within leaves an engine in the middle of a step: it is not used any more."""
        try:
            yield
        except BaseException as error:
            self._built.line.give_up(error)
            raise

    def _wait(self) -> None:
        """Wait for other ranks, or for the storage, where the engine has nothing else to do."""
        if (wait_s := self._engine.wait_s) <= 0:
            return
        if self._engine.line.under_way:
            with self._unbroken():
                self._engine.line.pump(wait_s)
        else:
            pause(min(wait_s, _PAUSE_S))


def _take(
    owners: dict[str, _Answer], progress: Progress, messages: list[FrontMessage], output: TurnOutput
) -> None:  # fmt: skip
    """Give the deltas of a turn to their answers, and add what the engine is to be told of them to `messages`."""
    for delta in (delta for _, deltas in output.deltas for delta in deltas):
        if delta.rid not in owners:
            continue  # a step that was under way when its stop text was found
        answer = owners[delta.rid]
        tokens, stopped = answer.take(delta)
        if stopped and delta.finish is None:
            answer.closing = True
            kept = len(answer.processor.token_ids)
            abort = Abort(rid=delta.rid, reason="stop text", matched_stop=True, kept=kept)
            messages.append(FrontMessage(front=_FRONT, message=abort))
        ended = delta.finish is not None
        if ended:
            del owners[delta.rid]
        progress.advance(done=int(ended), tokens=tokens)


def _completion(index: int, answer: _Answer) -> CompletionOutput:
    processor = answer.processor
    return CompletionOutput(
        index=index,
        text=processor.text,
        token_ids=tuple(processor.token_ids),
        finish_reason=(processor.finish or FinishReason.ERROR).value,
        stop_reason=processor.matched,
        logprobs=tuple(answer.logprobs),
        kv_integrity=None if answer.usage is None else answer.usage.kv_integrity,
    )


def _as_params(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, (list, tuple)) or not all(isinstance(each, SamplingParams) for each in params):
        raise BadRequest("sampling_params", params, "SamplingParams, or a list of them")
    if len(params) != count:
        raise BadRequest("sampling_params", f"{len(params)} of them", f"one, or one for each of {count} prompts")
    return list(params)
