"""A server on a free port of this machine, in a thread, and clients of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai

from caravan.serve.app import create_app
from caravan.serve.server import HttpServer, listener
from caravan.serve.service import Service

# An upper bound that says "it hangs".
BOUND = 20.0


class Served:
    """Where it is, and who talks to it."""

    def __init__(self, service: Any, port: int, server: HttpServer) -> None:
        self.service, self.port, self.server = service, port, server
        self.url = f"http://127.0.0.1:{port}"
        # without certificates, which take longer to read than most tests
        self.http = httpx.Client(base_url=self.url, timeout=BOUND, verify=False)
        # errors of the server's own, which no test expects
        self.errors: list[BaseException] = []

    def openai(self, key: str = "none", **options: Any) -> openai.OpenAI:
        http = httpx.Client(timeout=BOUND, verify=False)
        options = {"max_retries": 0, "timeout": BOUND, "http_client": http, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=body, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.http.get(path, **options)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), BOUND)


def asking(port: int, path: str, body: Any) -> socket.socket:
    """A client in the middle of its request."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", port), BOUND)
    lines = (
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    )
    connection.sendall("\r\n".join((*lines, "", "")).encode() + data)
    return connection


@contextmanager
def serving(service: Service, *, drain_seconds: float = 0.0, **options: Any) -> Iterator[Served]:
    ready = threading.Event()
    sock = listener("127.0.0.1", 0)
    port = sock.getsockname()[1]
    errors: list[BaseException] = []
    app = create_app(service, on_error=errors.append, **options)
    server = HttpServer(app, on_ready=ready.set, drain_seconds=drain_seconds)
    thread = threading.Thread(target=server.run_on, args=(sock,), name="server")
    thread.start()
    try:
        assert ready.wait(BOUND)
        served = Served(service, port, server)
        served.errors = errors
        with served.http:
            yield served
    finally:
        server.stop()
        thread.join(BOUND)
    assert not thread.is_alive()
    assert errors == []
