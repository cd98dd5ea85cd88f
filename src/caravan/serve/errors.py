"""`ApiError`: what a client is told went wrong, in OpenAI's format, and how ours become one."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from caravan.errors import CaravanError, NothingAllowed, QueueFull, UsageError, WorkerLost

# What pydantic says in the words of Python.
_WORDS = {
    "missing": "is missing",
    "too_short": "is empty",
    "string_type": "should be a text",
    "list_type": "should be a list",
    "dict_type": "should be an object",
    "model_type": "should be an object",
    "model_attributes_type": "should be an object",
}
# Of a client's own words that stand in a message.
_LONGEST = 600
_INVALID, _SERVER = "invalid_request_error", "server_error"


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        type: `invalid_request_error`, `authentication_error` or `server_error`.
        code: a word for programs, or None.
        param: the field of the request that it is about, or None.
        headers: beside the usual ones.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        type: str = "",
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(_shortened(message))
        self.status = status
        self.type = type or (_INVALID if status < 500 else _SERVER)
        self.code = code
        self.param = param and _shortened(param)
        self.headers = headers

    def body(self) -> dict[str, Any]:
        fields = {"message": str(self), "type": self.type, "param": self.param, "code": self.code}
        return {"error": fields}

    def event(self) -> bytes:
        """It in a stream that has begun."""
        return b"data: " + json.dumps(self.body()).encode() + b"\n\n"

    def response(self) -> Response:
        # all but ASCII is escaped: clients' words may have half characters
        data = json.dumps(self.body(), separators=(",", ":")).encode()
        return Response(data, self.status, self.headers, "application/json")


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"


def of_error(error: BaseException, param: str | None = None) -> ApiError:
    """What a client is told of an error of ours.

    Args:
        param: the field that it is about, if it is the client's.
    """
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFull):
        # whole seconds; a fraction more would come too early
        headers = {"Retry-After": str(math.ceil(error.retry_after))}
        return ApiError(str(error), status=503, code="queue_full", headers=headers)
    if isinstance(error, (UsageError, NothingAllowed)):
        return ApiError(str(error), param=param)
    if isinstance(error, WorkerLost):
        return ApiError(str(error), status=503, code="worker_lost")
    if isinstance(error, CaravanError):
        return ApiError(str(error), status=500)
    return ApiError("internal error", status=500, code="internal_error")


def shutting_down() -> ApiError:
    """A request that the server's end has cut off."""
    return ApiError("the server is shutting down", status=503, code="shutting_down")


async def answer_error(request: Request, exc: Exception) -> Response:
    """For all errors that handlers raise."""
    if isinstance(exc, RequestValidationError):
        return _of_validation(request, exc.errors()).response()
    if isinstance(exc, HTTPException):
        return _of_http(request, exc).response()
    return of_error(exc).response()


def _of_http(request: Request, exc: HTTPException) -> ApiError:
    where = f"{request.method} {request.url.path}"
    headers = dict(exc.headers or {})
    if exc.status_code == 404:
        return ApiError(f"unknown URL: {where}", status=404, code="unknown_url")
    if exc.status_code == 405:
        return ApiError(f"not possible: {where}", status=405, headers=headers)
    if exc.status_code == 400:
        # nested too deep, numbers too long, bytes that are no text
        return ApiError("the body is no JSON that can be read", code="invalid_json")
    return ApiError(str(exc.detail), status=exc.status_code, headers=headers)


def _of_validation(request: Request, errors: Sequence[Any]) -> ApiError:
    first = errors[0]
    if first["type"] == "json_invalid":
        place = f"{first['ctx']['error']} at character {first['loc'][-1]}"
        return ApiError(f"the body is not JSON: {place}", code="invalid_json")
    if tuple(first["loc"]) == ("body",):
        kind = request.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json" and not kind.endswith("+json"):
            message = "expected a JSON body with the header Content-Type: application/json"
            return ApiError(message, status=415)
        return ApiError(f"the body: {_words(first)}")
    param = _param(first["loc"])
    # a value that may be of several types has an error for each
    same = [error for error in errors if _param(error["loc"]).startswith(param)]
    words = "; or ".join(dict.fromkeys(map(_words, same)))
    return ApiError(f"{param}: {words}", param=param)


def _words(error: Any) -> str:
    words = _WORDS.get(error["type"])
    if words is not None:
        return words
    text = str(error["msg"]).removeprefix("Value error, ").removeprefix("Input ")
    return text[:1].lower() + text[1:]


def _param(place: Sequence[str | int]) -> str:
    """`messages[0].content`, without the names of types that pydantic tells, too."""
    text = ""
    for part in place[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            text += f".{part}" if text else part
    return text
