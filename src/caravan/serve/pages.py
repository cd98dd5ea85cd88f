"""`add_page`: the chat page with the cluster beside it, as routes of an app.

Serves the files in `page`, which is all that a browser asks for besides the API; nothing of another
origin. Knows the cluster as a snapshot only.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Protocol

from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, Response

_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "object-src 'none'"
)
_HEADERS = {
    # asked for each time, and answered with 304 most often: an update of the package shows at once
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_INDEX = "index.html"
_ICON = "icon.svg"


class View(Protocol):
    """A ClusterView, as seen from here."""

    def snapshot(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class File:
    """A file of the page."""

    data: bytes
    type: str
    etag: str

    def answer(self, request: Request) -> Response:
        """To GET or HEAD; 304 if the browser has it."""
        headers = {**_HEADERS, "ETag": self.etag}
        known = request.headers.get("if-none-match", "")
        if self.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
            return Response(status_code=304, headers=headers)
        return Response(self.data, headers=headers, media_type=self.type)


def files() -> dict[str, File]:
    """All of the page, by name."""
    found = {}
    for entry in resources.files("caravan.serve").joinpath("page").iterdir():
        suffix = entry.name[entry.name.rfind(".") :]
        if suffix in _TYPES:
            data = entry.read_bytes()
            etag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
            found[entry.name] = File(data, _TYPES[suffix], etag)
    return found


def add_page(app: FastAPI, view: View | None) -> None:
    """Add `/`, `/static/NAME` and `/cluster`.

    The first two are for everybody; the last one, which names machines, is for who has the key.

    Args:
        view: whose snapshot `/cluster` gives; without one it is an empty object.
    """
    page = files()
    methods = ["GET", "HEAD"]

    @app.api_route("/", methods=methods, include_in_schema=False)
    async def index(request: Request) -> Response:
        return page[_INDEX].answer(request)

    # browsers ask for that one before they have read where the icon is
    @app.api_route("/favicon.ico", methods=methods, include_in_schema=False)
    async def icon(request: Request) -> Response:
        return page[_ICON].answer(request)

    @app.api_route("/static/{name}", methods=methods, include_in_schema=False)
    async def static(name: str, request: Request) -> Response:
        if name not in page:
            raise HTTPException(404, f"there is no /static/{name}")
        return page[name].answer(request)

    @app.get("/cluster", include_in_schema=False)
    async def cluster() -> Response:
        snapshot = {} if view is None else view.snapshot()
        return JSONResponse(snapshot, headers={"Cache-Control": "no-store"})
