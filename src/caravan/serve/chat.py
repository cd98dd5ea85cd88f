"""Chats: a request's messages through the model's template into a batcher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import Response

from caravan.batching import Request as BatchRequest
from caravan.errors import UsageError
from caravan.serve.chat_answer import ChatAnswer
from caravan.serve.errors import ApiError, of_error
from caravan.serve.requests import ChatRequest, TemplateFields
from caravan.serve.responding import Json, respond
from caravan.serve.running import Running
from caravan.serve.service import Service, Template
from caravan.serve.state import aside, state_of, submit, tokens_of

# Variables of templates that are not the client's.
_OURS = ("self", "messages", "tools", "add_generation_prompt")


async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = state_of(request)
    running = state.running()
    answer = await aside(_begin, body, state.service, running)
    return await respond(request, running, answer, bool(body.stream))


async def apply_template(body: TemplateFields, request: Request) -> Response:
    """The text that a chat becomes."""
    service = state_of(request).service
    text = await aside(rendered, body, service, body.told_tools())
    return Json({"prompt": text})


def _begin(body: ChatRequest, service: Service, running: Running) -> ChatAnswer:
    tools = _tools(body)
    prompt = tuple(tokens_of(service, rendered(body, service, tools), "messages"))
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    stop = (*template_of(service).stop, *body.stops)
    logprobs = _logprobs(body)
    samplings = body.sampling(service.sampling, _call_grammar(body, service))
    requests = [
        BatchRequest(prompt, -1 if most is None else most, sampling, stop, logprobs)
        for sampling in samplings
    ]
    answer = ChatAnswer(
        service.model_name,
        len(requests),
        splits=[service.split_calls(tools) for _ in requests] if tools else (),
        parallel=body.parallel_tool_calls is not False,
        logprobs=logprobs is not None,
        with_usage=body.with_usage,
    )
    submit(running, service, requests)
    return answer


def _logprobs(body: ChatRequest) -> int | None:
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def template_of(service: Service) -> Template:
    if service.template is None:
        raise ApiError("the model has no chat template", code="no_chat_template")
    return service.template


def rendered(body: TemplateFields, service: Service, tools: Sequence[dict[str, Any]]) -> str:
    """The chat as the model wants to read it. Raises ApiError."""
    template = template_of(service)
    variables = body.chat_template_kwargs or {}
    for name in _OURS:
        if name in variables:
            param = f"chat_template_kwargs.{name}"
            raise ApiError(f"{param} cannot be set there", param=param)
    try:
        return template.render(body.told_messages(), tools=tools, **variables)
    except UsageError as exc:
        raise of_error(exc, "messages") from exc


def _tools(body: ChatRequest) -> list[dict[str, Any]]:
    """Those that the template is told of. Raises ApiError."""
    tools, choice = body.told_tools(), body.tool_choice
    if choice not in (None, "auto", "none") and not tools:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    return [] if choice == "none" else tools


def _call_grammar(body: ChatRequest, service: Service) -> str:
    """What makes the answer a call, where it has to be one. Raises ApiError."""
    choice = body.tool_choice
    if choice in (None, "auto", "none"):
        return ""
    if body.grammar or (body.response_format and body.response_format.type != "text"):
        raise ApiError("an answer of that form cannot be a call, too", param="tool_choice")
    name = "" if isinstance(choice, str) or choice is None else choice.function.name
    try:
        return service.call_grammar(body.told_tools(), name)
    except UsageError as exc:
        raise of_error(exc, "tool_choice") from exc
