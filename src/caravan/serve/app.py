"""`create_app`: the routes of the HTTP server over a `Service`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from caravan.errors import CaravanError
from caravan.serve import chat, completions, embeddings, info
from caravan.serve.door import Door, Keys, Log, OnError
from caravan.serve.errors import ApiError, answer_error
from caravan.serve.metrics import Metrics
from caravan.serve.pages import add_page
from caravan.serve.service import Service
from caravan.serve.state import State

MOST_BODY_BYTES = 16 << 20

# Those of OpenAI's API, with /v1 before them and without.
_API: tuple[tuple[str, str, Callable[..., Awaitable[Response]]], ...] = (
    ("GET", "/models", info.models),
    ("GET", "/models/{name:path}", info.model),
    ("POST", "/chat/completions", chat.chat_completions),
    ("POST", "/completions", completions.completions),
    ("POST", "/embeddings", embeddings.embeddings),
    ("GET", "/health", info.health),
)
_OTHERS: tuple[tuple[str, str, Callable[..., Awaitable[Response]]], ...] = (
    ("GET", "/metrics", info.metrics),
    ("GET", "/props", info.props),
    ("GET", "/slots", info.slots),
    ("POST", "/tokenize", info.tokenize),
    ("POST", "/detokenize", info.detokenize),
    ("POST", "/apply-template", chat.apply_template),
)


def create_app(
    service: Service,
    *,
    keys: Sequence[str] = (),
    cors_origins: Sequence[str] = (),
    local_only: bool = False,
    most_body_bytes: int = MOST_BODY_BYTES,
    log: Log | None = None,
    on_error: OnError | None = None,
) -> FastAPI:
    """The app.

    Args:
        keys: one of which clients have to show; none: everybody may come in.
        local_only: only who calls the server by a name of this machine may come in. A page of
            somewhere else can have its own name lead here, and be of the same origin then.
        cors_origins: where pages come from that browsers may let in; `*`: all.
        log: told of every request.
        on_error: told of errors that are the server's own.
    """
    # no pages of documentation: they would load scripts from elsewhere
    app = FastAPI(title="Caravan", docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(service.batcher, service.view)
    app.state.caravan = State(service, metrics)
    for method, path, handler in _API:
        app.add_api_route(f"/v1{path}", handler, methods=[method], response_model=None)
        app.add_api_route(
            path, handler, methods=[method], response_model=None, include_in_schema=False
        )
    for method, path, handler in _OTHERS:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    # so that whoever watches it may do without the body
    for path in ("/health", "/v1/health"):
        app.add_api_route(
            path, info.health, methods=["HEAD"], response_model=None, include_in_schema=False
        )
    add_page(app, service.view)
    for error in (RequestValidationError, HTTPException, ApiError, CaravanError):
        app.add_exception_handler(error, answer_error)
    app.add_middleware(
        Door,
        keys=Keys(keys),
        local_only=local_only,
        most_bytes=most_body_bytes,
        metrics=metrics,
        log=log,
        on_error=on_error,
    )
    if cors_origins:
        # outside of the door: browsers ask without a key whether they may ask
        allowed: Any = {"allow_origins": list(cors_origins), "allow_headers": ["*"]}
        app.add_middleware(CORSMiddleware, allow_methods=["GET", "POST"], **allowed)
    return app
