"""/v1/embeddings: the last hidden states of each text, pooled as the checkpoint says, where it is an embedding
model."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np

from serinus.core.errors import BadRequest
from serinus.core.ids import new_rid
from serinus.core.sampling import SamplingParams
from serinus.front.agent_answers import Embedding, EmbeddingList, EmbeddingUsage
from serinus.front.agent_schemas import EmbeddingsBody
from serinus.front.calls import SequenceState
from serinus.front.exchange import HttpExchange
from serinus.front.schemas import OpenAiBody
from serinus.front.state import Front, prompts_of

_PARAMS = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True, hidden_state=True)
"""The engine computes a text by choosing what could follow it; that token is dropped."""


async def embeddings(front: Front, exchange: HttpExchange) -> None:
    """Answer one request. Errors are raised; the endpoint around it shows them."""
    start = front.clock.now()
    body = await front.read(exchange, EmbeddingsBody)
    front.check_model(body.model)
    use = await front.embedding_use()
    if use.refused:
        raise BadRequest("model", front.settings.model_name, f"an embedding model: {use.refused}")
    if body.encoding_format not in (None, "float", "base64"):
        raise BadRequest("encoding_format", body.encoding_format, "float or base64")
    prompts = prompts_of("input", body.input)
    front.check_count("input", len(prompts))
    count = len(prompts)
    params = replace(_PARAMS, pooling=use.pooling)
    asks = await front.asks("input", prompts, [params] * count, limit_fields=[""] * count)
    about = OpenAiBody(priority=body.priority, timeout=body.timeout, cache_salt=body.cache_salt)
    async with front.calling(exchange, asks, about, request_id=new_rid("embd"), start=start) as call:
        await call.run()
        data = [
            Embedding(index=index, embedding=_embedding(front, body, sequence, normalized=use.normalized))
            for index, sequence in enumerate(call.sequences)
        ]
        usage = EmbeddingUsage(prompt_tokens=call.prompt_tokens, total_tokens=call.prompt_tokens)
        await exchange.json(EmbeddingList(data=data, model=front.settings.model_name, usage=usage))


def _embedding(front: Front, body: EmbeddingsBody, sequence: SequenceState, *, normalized: bool) -> list[float] | str:
    """Raises BadRequest: the model gives out no hidden states, or they have other dimensions."""
    hidden = sequence.logprobs[0].hidden if sequence.logprobs else b""
    if not hidden:
        expected = "an embedding model that gives out hidden states: the code that runs this one does not"
        raise BadRequest("model", front.settings.model_name, expected)
    states_E = np.frombuffer(hidden, "<f4")
    if body.dimensions is not None:
        if not 1 <= body.dimensions <= len(states_E):
            raise BadRequest("dimensions", body.dimensions, f"1 to {len(states_E)}, the model's own")
        states_E = states_E[: body.dimensions]
    if normalized:
        states_E = states_E / max(float(np.linalg.norm(states_E)), 1e-12)
    if body.encoding_format == "base64":
        return base64.b64encode(states_E.astype("<f4").tobytes()).decode()
    found: list[float] = states_E.tolist()
    return found
