"""What can be asked of the server and its model, beside answers: models, health, slots, tokens."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import Response

from caravan.serve.answer import shown
from caravan.serve.errors import ApiError
from caravan.serve.requests import DetokenizeRequest, TokenizeRequest
from caravan.serve.responding import Json
from caravan.serve.service import Service
from caravan.serve.state import aside, state_of


async def models(request: Request) -> Response:
    return Json({"object": "list", "data": [_model(state_of(request).service)]})


async def model(name: str, request: Request) -> Response:
    service = state_of(request).service
    if name != service.model_name:
        message = f"the model {name!r} does not exist; there is {service.model_name!r}"
        raise ApiError(message, status=404, code="model_not_found", param="model")
    return Json(_model(service))


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.created,
        "owned_by": "caravan",
        "meta": dict(service.facts),
    }


async def health(request: Request) -> Response:
    error = state_of(request).service.batcher.state().error
    if error is not None:
        raise ApiError(str(error), status=503, code="not_computing")
    return Json({"status": "ok"})


async def metrics(request: Request) -> Response:
    text, kind = state_of(request).metrics.text()
    return Response(text, media_type=kind)


async def props(request: Request) -> Response:
    """As llama-server tells them, as far as there is the same."""
    service = state_of(request).service
    given, template = service.sampling, service.template
    return Json(
        {
            "default_generation_settings": {
                "n_ctx": service.n_ctx,
                "params": {
                    "temperature": given.temp,
                    "top_k": given.top_k,
                    "top_p": given.top_p,
                    "min_p": given.min_p,
                    "repeat_penalty": given.repeat_penalty,
                    "repeat_last_n": given.repeat_last_n,
                    "seed": given.seed,
                },
            },
            "total_slots": len(service.batcher.state().slots),
            "model_alias": service.model_name,
            "chat": template is not None,
            "chat_template": "" if template is None else template.source,
            "model": dict(service.facts),
        }
    )


async def slots(request: Request) -> Response:
    service = state_of(request).service
    return Json(
        [
            {
                "id": number,
                "lane": slot.lane,
                "n_ctx": service.n_ctx,
                "is_processing": slot.busy,
                "is_reading": slot.reading,
                "n_held": slot.n_held,
                "n_decoded": slot.n_gen,
            }
            for number, slot in enumerate(service.batcher.state().slots)
        ]
    )


async def tokenize(body: TokenizeRequest, request: Request) -> Response:
    service = state_of(request).service
    return await aside(_tokenized, body, service)


def _tokenized(body: TokenizeRequest, service: Service) -> Response:
    tokens = service.tokenize(body.content, add_special=body.add_special)
    if not body.with_pieces:
        return Json({"tokens": tokens})
    return Json({"tokens": [{"id": i, "piece": _piece(service, i)} for i in tokens]})


def _piece(service: Service, token: int) -> str | list[int]:
    """Bytes where it is part of a character."""
    piece = service.piece(token)
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)


async def detokenize(body: DetokenizeRequest, request: Request) -> Response:
    service = state_of(request).service
    return await aside(_text, body, service)


def _text(body: DetokenizeRequest, service: Service) -> Response:
    return Json({"content": shown(b"".join(map(service.piece, body.tokens)))})
