"""`Door`: every request passes it: who may come in, how much they may bring, what is counted."""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Iterable

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from caravan.serve.errors import ApiError, of_error
from caravan.serve.metrics import Metrics
from caravan.serve.responding import HUNG_UP
from caravan.transport.endpoint import is_loopback

# What everybody may see: whether it is there, and the page, which asks for a key itself.
OPEN = ("/", "/health", "/v1/health", "/favicon.ico")
OPEN_FOLDER = "/static/"

# told of method, path, status, seconds and the client's address
Log = Callable[[str, str, int, float, str], None]

OnError = Callable[[Exception], None]


class Keys:
    """The keys that let in. Without any, everybody may."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def fits(self, key: str) -> bool:
        """Takes as long for any key."""
        shown = _digest(key.encode("utf-8", "replace"))
        found = [hmac.compare_digest(digest, shown) for digest in self._digests]
        return any(found)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _is_local(host: str) -> bool:
    """Whether the header names this machine, with a port or without."""
    name = host.rpartition(":")[0] if re.search(r":\d*$", host) else host
    name = name.removeprefix("[").removesuffix("]").lower()
    return name in ("", "localhost") or name.endswith(".localhost") or is_loopback(name)


class Door:
    """See the module; an ASGI app around another one.

    Args:
        local_only: only who calls it by a name of this machine may come in.
        most_bytes: of a request's body.
        log: told of every request; None: nobody is.
        on_error: told of errors that are the server's own.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        local_only: bool,
        most_bytes: int,
        metrics: Metrics,
        log: Log | None = None,
        on_error: OnError | None = None,
    ) -> None:
        self._app = app
        self._keys = keys
        self._local_only = local_only
        self._most = most_bytes
        self._metrics = metrics
        self._log = log
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        # of somebody who has gone before there was an answer
        status = HUNG_UP

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._let_in(scope, receive, noting)
        except Exception as exc:
            if self._on_error is not None:
                self._on_error(exc)
            if status != HUNG_UP:
                # half an answer: only the end of the connection tells that
                raise
            await of_error(exc).response()(scope, receive, noting)
        finally:
            self._count(scope, status, time.monotonic() - began)

    def _count(self, scope: Scope, status: int, seconds: float) -> None:
        route = getattr(scope.get("route"), "path", "") or "other"
        # clients may not make names of their own
        method = scope["method"] if scope["method"] in ("GET", "POST") else "other"
        self._metrics.answered(method, route.removeprefix("/v1"), status, seconds)
        if self._log is not None:
            client = scope.get("client") or ("?", 0)
            self._log(scope["method"], scope["path"], status, seconds, client[0])

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            self._check_size(headers)
        except ApiError as exc:
            await exc.response()(scope, receive, send)
            return
        await self._app(scope, self._bounded(receive), send)

    def _check_host(self, headers: Headers) -> None:
        if not self._local_only or _is_local(headers.get("host", "")):
            return
        message = "without an API key this server answers to localhost only, and to no other name"
        raise ApiError(message, status=403, code="wrong_host")

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in OPEN or path.startswith(OPEN_FOLDER):
            return
        kind, _, key = headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            key = headers.get("x-api-key", "")
        if self._keys.fits(key.strip()):
            return
        raise ApiError(
            "the API key is wrong" if key else "an API key is needed: Authorization: Bearer KEY",
            status=401,
            type="authentication_error",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )

    def _check_size(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._most:
            raise ApiError(self._too_large(), status=413)

    def _too_large(self) -> str:
        return f"the body is larger than {self._most} bytes"

    def _bounded(self, receive: Receive) -> Receive:
        """For bodies that do not say how long they are."""
        left = self._most

        async def bounded() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, self._too_large())
            return message

        return bounded
