"""Completions: texts or tokens into a batcher as they are, several prompts at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import Request
from fastapi.responses import Response

from caravan.batching import Request as BatchRequest
from caravan.serve.completion_answer import CompletionAnswer
from caravan.serve.errors import ApiError
from caravan.serve.fields import MOST_CHOICES
from caravan.serve.requests import CompletionRequest
from caravan.serve.responding import respond
from caravan.serve.running import Running
from caravan.serve.service import Service
from caravan.serve.state import aside, check_length, state_of, submit, tokens_of

# The API's own; chats have no bound.
_MAX_TOKENS = 16


async def completions(body: CompletionRequest, request: Request) -> Response:
    state = state_of(request)
    running = state.running()
    answer = await aside(_begin, body, state.service, running)
    return await respond(request, running, answer, bool(body.stream))


def _begin(body: CompletionRequest, service: Service, running: Running) -> CompletionAnswer:
    _check(body)
    prompts = token_lists(body.prompt, service, "prompt")
    samplings = body.sampling(service.sampling)
    if len(prompts) * len(samplings) > MOST_CHOICES:
        raise ApiError(f"more than {MOST_CHOICES} choices in all", param="prompt")
    most = _MAX_TOKENS if body.max_tokens is None else body.max_tokens
    requests = [
        BatchRequest(tuple(prompt), most, sampling, body.stops, body.logprobs)
        for prompt in prompts
        for sampling in samplings
    ]
    answer = CompletionAnswer(
        service.model_name,
        _echoes(body, service, prompts),
        len(samplings),
        logprobs=body.logprobs is not None,
        with_usage=body.with_usage,
    )
    submit(running, service, requests)
    return answer


def _check(body: CompletionRequest) -> None:
    """Refuse what would be another answer without it."""
    if body.suffix:
        raise ApiError("suffix is not supported", param="suffix")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError("best_of is not supported, unless it is n", param="best_of")
    if body.echo and body.logprobs is not None:
        raise ApiError("echo has no logprobs of the prompt", param="echo")


def token_lists(
    given: str | list[str] | list[int] | list[list[int]], service: Service, param: str
) -> list[list[int]]:
    """Every prompt as tokens. Raises ApiError for one that is empty or too long."""
    items: Sequence[str | int | list[int]] = [given] if isinstance(given, str) else given
    if items and isinstance(items[0], int):
        items = [[token for token in items if isinstance(token, int)]]
    if not items:
        raise ApiError(f"{param} is empty", param=param)
    found: list[list[int]] = []
    for index, item in enumerate(items):
        assert not isinstance(item, int)
        place = f"{param}[{index}]" if len(items) > 1 else param
        if isinstance(item, str):
            found.append(tokens_of(service, item, place))
        else:
            check_length(service, item, place)
            found.append(item)
    return found


def _echoes(body: CompletionRequest, service: Service, prompts: list[list[int]]) -> list[str]:
    if not body.echo:
        return [""] * len(prompts)
    if isinstance(body.prompt, str):
        return [body.prompt]
    return [
        given
        if isinstance(given, str)
        else b"".join(map(service.piece, tokens)).decode("utf-8", "replace")
        for given, tokens in zip(body.prompt, prompts, strict=False)
    ]
