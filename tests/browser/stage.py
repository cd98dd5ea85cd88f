"""The page on a server of its own: a model that says what it is told to, a made-up cluster."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from caravan.serve.pages import add_page

MIB = 1 << 20
ANSWER = """Two ways, both *quick* and **safe**:

1. Turn the links around, one after the other.
2. Or ask `reversed`, which <script>window.bad = 1</script> needs no care.

```python
def reverse(node):
    before = None
    while node:
        node.next, before, node = before, node, node.next
    return before
```

More at [the manual](https://docs.python.org/3/) and <img src=x onerror="window.bad = 1">.
"""
# what is below it then
WHOLE = f"{-(-len(ANSWER) // 5)} tokens"


class Model:
    """Stands for the API: streams `ANSWER`, or numbers without end if asked for `endless`.

    Attributes:
        bodies: of the requests so far.
        hung_up: answers that the browser did not want any more.
        key: that it wants, if any.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.hung_up = 0
        self.key = ""

    def add_to(self, app: FastAPI) -> None:
        app.add_middleware(Door, model=self)

        @app.get("/v1/models")
        async def models() -> JSONResponse:
            return JSONResponse({"object": "list", "data": [{"id": "smollm2"}]})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Any:
            body = await request.json()
            self.bodies.append(body)
            asked = body["messages"][-1]["content"]
            if asked == "full":
                return error("64 requests are waiting", 503, {"Retry-After": "7"})
            words = self.answer(asked)
            return StreamingResponse(words, media_type="text/event-stream")

    def refuses(self, request: Request) -> bool:
        path = request.url.path
        if not self.key or path in ("/", "/favicon.ico") or path.startswith("/static/"):
            return False
        return request.headers.get("authorization") != f"Bearer {self.key}"

    async def answer(self, asked: str) -> AsyncIterator[str]:
        count, whole = 0, False
        try:
            for text in numbers() if "endless" in asked else pieces(ANSWER):
                yield event({"choices": [{"index": 0, "delta": {"content": text}}]})
                count += 1
                await asyncio.sleep(0.005)
            whole = True
        finally:
            # cancelled while it slept, or closed while its text was sent
            self.hung_up += not whole
        if asked == "breaks":
            yield event({"error": {"message": "lost RPC1 at lab2:50052"}})
            return
        yield event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        usage = {"prompt_tokens": 31, "completion_tokens": count}
        usage |= {"prompt_tokens_details": {"cached_tokens": 12}}
        yield event({"choices": [], "usage": usage})
        yield "data: [DONE]\n\n"


class Door:
    """Keeps out who has not the key; an answer that is given up is cancelled through it."""

    def __init__(self, app: ASGIApp, model: Model) -> None:
        self._app, self._model = app, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and self._model.refuses(Request(scope)):
            app = error("the API key is wrong", 401)
        await app(scope, receive, send)


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def error(message: str, status: int, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)


def pieces(text: str) -> Iterator[str]:
    for start in range(0, len(text), 5):
        yield text[start : start + 5]


def numbers() -> Iterator[str]:
    for number in range(100_000):
        yield f"{number} "


class View:
    """A made-up cluster; `lost` names devices that are."""

    def __init__(self) -> None:
        self.lost: set[str] = set()

    def snapshot(self) -> dict[str, Any]:
        names = ("RPC0", "RPC1", "RPC2")
        rate = [30 + 8 * math.sin(n / 4) if n > 12 else 0.0 for n in range(60)]
        return {
            "time": 1795000000.0,
            "since": 1794990000.0,
            "period": 1.0,
            "model": {
                "name": "smollm2",
                "description": "llama 135M Q4_1",
                "size": 96576768,
                "n_params": 134515008,
                "n_layer": 30,
                "n_ctx_train": 8192,
                "changing": False,
            },
            "devices": [self.device(number, name) for number, name in enumerate(names)],
            "routes": [
                route("RPC0", "RPC1", "direct", 0.00011, ""),
                route("RPC1", "RPC2", "relay", None, "direct copies are off"),
            ],
            "work": work(rate),
            "losses": losses(bool(self.lost)),
        }

    def device(self, number: int, name: str) -> dict[str, Any]:
        lost = name in self.lost
        busy = [0.3 + 0.1 * number + 0.2 * math.sin(n / 5 + number) for n in range(60)]
        used = {"weights": 33 * MIB * (number + 1), "kv": 23 * MIB, "compute": 36 * MIB}
        return {
            "name": name,
            "endpoint": f"lab{number + 1}:50052",
            "description": "AMD EPYC 7B13, 8 threads",
            "engine": "0.26.0",
            "cause": "the peer closed the connection" if lost else "",
            "memory": {"free": (350 - 60 * number) * MIB, "total": 640 * MIB, "used": used},
            "link": None if lost else {"round_trip": 2.1e-4, "bytes_in": 91e3, "bytes_out": 1.2e6},
            "busy": [None] * 10 + busy[10:55] + [None] * 5 if lost else busy,
            "state": "lost" if lost else "there",
            "layers": [10 * number, 10 * number + 9],
            "output": number == 2,
        }


def route(source: str, target: str, path: str, trip: float | None, why: str) -> dict[str, Any]:
    names = {"source": source, "target": target}
    return {**names, "path": path, "round_trip": trip, "reason": why}


def work(rate: list[float]) -> dict[str, Any]:
    slots = [(True, 812, 230, False), (True, 300, 0, True), (False, 1500, 0, False)]
    slots.append((False, 0, 0, False))
    fields = ("busy", "n_held", "n_gen", "reading")
    return {
        "n_ctx": 4096,
        "slots": [
            {"lane": n % 2, **dict(zip(fields, s, strict=True))} for n, s in enumerate(slots)
        ],
        "queued": 3,
        "finished": {"stop": 40, "length": 2},
        "refused": 1,
        "n_prompt": 18231,
        "n_cached": 5120,
        "n_gen": 12345,
        "prompt_rate": [0.0] * 59 + [412.0],
        "gen_rate": rate,
        "error": None,
    }


def losses(waiting: bool) -> dict[str, Any]:
    recent = {
        "time": 1794999000.0,
        "devices": ["RPC1"],
        "endpoint": "lab2:50052",
        "cause": "the peer closed the connection",
        "gone": {},
        "seconds": 2.31,
        "n_tokens": 1112,
    }
    lost = {"device": "RPC1 at lab2:50052", "since": 1795000000.0, "seconds": 60.0}
    return {"count": 1, "waiting": lost if waiting else None, "recent": [recent]}


@contextmanager
def serving(app: FastAPI) -> Iterator[str]:
    """The app on a free port of this machine; its address."""
    config = uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    socket = config.bind_socket()
    thread = threading.Thread(target=server.run, args=([socket],), name="test-server")
    thread.start()
    try:
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        socket.close()


@contextmanager
def staged() -> Iterator[tuple[str, Model, View]]:
    """Address, model and cluster."""
    app, model, view = FastAPI(), Model(), View()
    model.add_to(app)
    add_page(app, view)
    with serving(app) as address:
        yield address, model, view
