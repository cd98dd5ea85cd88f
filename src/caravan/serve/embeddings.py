"""Embeddings: a vector of length 1 for each text."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import Response
from numpy.typing import NDArray

from caravan.errors import QueueFull
from caravan.serve.completions import token_lists
from caravan.serve.errors import ApiError, of_error
from caravan.serve.requests import EmbeddingRequest
from caravan.serve.responding import HUNG_UP, Json
from caravan.serve.service import Service
from caravan.serve.state import State, aside, state_of

# Requests that may wait for their turn.
MOST_WAITING = 64
# Tokens that are computed before somebody looks whether the client is still there.
_SLICE = 4096


async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state = state_of(request)
    service = state.service
    prompts = await aside(_prompts, body, service)
    if state.n_embedding >= MOST_WAITING:
        raise of_error(QueueFull(f"{state.n_embedding} requests for embeddings are waiting", 1.0))
    state.n_embedding += 1
    try:
        vectors = await _vectors(prompts, state, request)
    finally:
        state.n_embedding -= 1
    if vectors is None:
        return Response(status_code=HUNG_UP)
    # millions of numbers take a while to write down
    return await aside(_answer, body, service, prompts, vectors)


async def _vectors(
    prompts: list[list[int]], state: State, request: Request
) -> list[NDArray[np.float32]] | None:
    """One for each; None if the client has gone. Raises what computing them raises."""
    found: list[NDArray[np.float32]] = []
    for part in _slices(prompts):
        async with state.embedding:
            if await request.is_disconnected():
                return None
            state.check_open()
            found.extend(await aside(state.service.embed, part))
    return found


def _answer(
    body: EmbeddingRequest,
    service: Service,
    prompts: list[list[int]],
    vectors: list[NDArray[np.float32]],
) -> Response:
    if body.dimensions is not None and body.dimensions != len(vectors[0]):
        message = f"dimensions is not supported; the model's vectors have {len(vectors[0])}"
        raise ApiError(message, param="dimensions")
    count = sum(map(len, prompts))
    return Json(
        {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": _coded(body, vector)}
                for index, vector in enumerate(vectors)
            ],
            "model": service.model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }
    )


def _prompts(body: EmbeddingRequest, service: Service) -> list[list[int]]:
    return token_lists(body.input, service, "input")


def _slices(prompts: list[list[int]]) -> list[list[list[int]]]:
    """Texts that are computed in one go, one at least."""
    slices: list[list[list[int]]] = []
    room = 0
    for prompt in prompts:
        if not slices or len(prompt) > room:
            slices.append([])
            room = _SLICE
        slices[-1].append(prompt)
        room -= len(prompt)
    return slices


def _coded(body: EmbeddingRequest, vector: NDArray[np.float32]) -> Any:
    if body.encoding_format == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
