"""A client that goes costs nothing more; one that waits is told that it is not forgotten."""

from __future__ import annotations

import asyncio
import itertools
import json
import struct
import threading
from socket import SO_LINGER, SOL_SOCKET, socket
from types import SimpleNamespace

import httpx
import openai
import pytest

from caravan.errors import DecodeError
from caravan.serve import responding, server
from caravan.serve.app import create_app
from caravan.serve.server import HttpServer, listener
from serve.fakes import FakeBatcher, FakeService
from serve.serving import BOUND, asking, serving


def reset(connection: socket) -> None:
    connection.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("end", [socket.close, reset])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
def test_what_a_client_has_asked_for_ends_with_it(begun, stream, end, served):
    """Before its first token, and between two."""
    batcher = served.service.batcher
    hold = batcher.hold

    def reply(request):
        if begun:
            yield from b"some"
        hold()
        yield from b"more"

    batcher.reply = reply
    body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
    connection = asking(served.port, "/v1/completions", body)
    batcher.wait_for(lambda: batcher.n_busy == 4)
    if begun and stream:
        assert connection.recv(1)
    end(connection)
    batcher.wait_for(lambda: batcher.n_busy == 0)
    assert batcher.finished == {"cancelled": 4}


def test_one_that_waits_for_a_slot_can_go_too():
    batcher = FakeBatcher(n_slots=1)
    batcher.hold()
    try:
        with serving(FakeService(batcher)) as served:
            first = asking(served.port, "/v1/completions", {"prompt": "a"})
            batcher.wait_for(lambda: batcher.n_busy == 1)
            second = asking(served.port, "/v1/completions", {"prompt": "b"})
            batcher.wait_for(lambda: batcher.n_waiting == 1)
            second.close()
            batcher.wait_for(lambda: batcher.n_waiting == 0)
            assert batcher.n_busy == 1
            batcher.go()
            assert first.recv(15) == b"HTTP/1.1 200 OK"
            first.close()
    finally:
        batcher.close()


def test_a_client_that_closes_its_stream_has_ended_it(client, served):
    batcher = served.service.batcher

    def reply(request):
        while True:
            yield ord("x")

    batcher.reply = reply
    stream = client.chat.completions.create(
        model="x", messages=[{"role": "user", "content": "a"}], stream=True
    )
    next(iter(stream))
    stream.close()
    batcher.wait_for(lambda: batcher.n_busy == 0)
    assert batcher.finished == {"cancelled": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_a_task_of_the_client_that_is_cancelled(stream, served):
    """Some of many at the same time; the others get their answers."""
    batcher = served.service.batcher
    batcher.n_slots = 20
    batcher.hold()

    async def ask(client: openai.AsyncOpenAI, number: int) -> str:
        answer = await client.completions.create(model="x", prompt=f"a{number}", stream=stream)
        if not stream:
            return answer.choices[0].text
        return "".join([chunk.choices[0].text async for chunk in answer])

    async def ask_all() -> list[str | BaseException]:
        http = httpx.AsyncClient(verify=False, timeout=BOUND)
        async with openai.AsyncOpenAI(
            base_url=f"{served.url}/v1", api_key="none", http_client=http, max_retries=0
        ) as client:
            tasks = [asyncio.create_task(ask(client, number)) for number in range(20)]
            await asyncio.to_thread(batcher.wait_for, lambda: batcher.n_busy == 20)
            for task in tasks[::4]:
                task.cancel()
            await asyncio.to_thread(batcher.wait_for, lambda: batcher.n_busy == 15)
            batcher.go()
            return await asyncio.gather(*tasks, return_exceptions=True)

    answers = asyncio.run(ask_all())
    for number, answer in enumerate(answers):
        if number % 4:
            assert answer == f"A{number}"
        else:
            assert isinstance(answer, asyncio.CancelledError)
    assert batcher.finished == {"cancelled": 5, "eog": 15}


def test_a_client_that_does_not_read_keeps_nobody_waiting(served, client):
    """Its answer waits here; the others do not."""
    batcher = served.service.batcher
    answers = {"long": "x" * 200_000, "short": "y"}
    batcher.answer = lambda request: answers[bytes(request.prompt[1:]).decode()]
    body = {"prompt": "long", "stream": True, "max_tokens": -1}
    slow = asking(served.port, "/v1/completions", body)
    batcher.wait_for(lambda: batcher.n_busy == 1)
    assert client.completions.create(model="x", prompt="short").choices[0].text == "y"
    reset(slow)
    batcher.wait_for(lambda: batcher.n_busy == 0)


def test_a_stream_without_tokens_shows_that_it_is_alive(served, monkeypatch):
    monkeypatch.setattr(responding, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(responding, "ALIVE_SECONDS", 0.01)
    batcher = served.service.batcher
    batcher.hold()
    body = {"prompt": "a", "stream": True}
    with httpx.stream("POST", f"{served.url}/v1/completions", json=body, timeout=BOUND) as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        lines = reply.iter_lines()
        assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
        batcher.go()
        events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == "A"


def test_the_official_client_does_not_mind_signs_of_life(served, client, monkeypatch):
    monkeypatch.setattr(responding, "_FIRST_SECONDS", 0.01)
    monkeypatch.setattr(responding, "ALIVE_SECONDS", 0.01)
    batcher = served.service.batcher
    batcher.hold()
    with client.completions.create(model="x", prompt="abc", stream=True) as stream:
        batcher.go()
        assert "".join(chunk.choices[0].text for chunk in stream) == "ABC"


def test_the_end_of_the_server_is_told_to_who_is_left():
    """Those who have time get their answers."""
    batcher = FakeBatcher()
    held = threading.Semaphore(0)

    def reply(request):
        yield from b"ab"
        batcher.hold()
        held.release()
        yield from b"cd"

    batcher.reply = reply
    try:
        with serving(FakeService(batcher), drain_seconds=0.3) as served, served.openai() as client:
            stream = client.completions.create(model="x", prompt="s", stream=True)
            texts = [chunk.choices[0].text for chunk in itertools.islice(stream, 2)]
            assert held.acquire(timeout=BOUND)
            served.server.stop()
            with pytest.raises(openai.APIError, match="shutting down"):
                texts += [chunk.choices[0].text for chunk in stream]
            assert texts == ["a", "b"]
            batcher.go()
            with pytest.raises(openai.APIConnectionError):
                client.models.list()
            assert served.service.given_up
        with (
            serving(FakeService(batcher), drain_seconds=BOUND) as served,
            served.openai() as client,
        ):
            stream = client.completions.create(model="x", prompt="s", stream=True)
            assert held.acquire(timeout=BOUND)
            served.server.stop()
            batcher.go()
            assert "".join(chunk.choices[0].text for chunk in stream) == "abcd"
    finally:
        batcher.close()


def test_a_server_that_cannot_compute_any_more_ends_and_says_why(monkeypatch):
    monkeypatch.setattr(server, "_TICK_SECONDS", 0.01)
    service = FakeService()
    failure = DecodeError("no more")
    found = HttpServer(create_app(service), failed=lambda: failure)
    with listener("127.0.0.1", 0) as sock, pytest.raises(DecodeError) as caught:
        found.run_on(sock)
    assert caught.value is failure


def test_a_question_that_never_ends_does_not_keep_the_server(served, monkeypatch):
    monkeypatch.setattr(server, "_LAST_SECONDS", 0.1)
    connection = served.connect()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n1")
    assert served.get("/health").status_code == 200
    served.server.stop()
    assert connection.recv(1) == b""
    connection.close()


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /health HTTP/1.1\r\n", b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"],
)
@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_connection_on_which_nothing_is_asked_is_closed(before, begun, monkeypatch):
    if begun.startswith(b"POST"):
        begun += b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{"
    monkeypatch.setattr(server, "_PATIENCE_SECONDS", 0.02)
    monkeypatch.setattr(server, "_TICK_SECONDS", 0.01)
    service = FakeService()
    service.batcher.hold()
    try:
        with serving(service) as served:
            asked = asking(served.port, "/v1/completions", {"prompt": "a", "stream": True})
            service.batcher.wait_for(lambda: service.batcher.n_busy == 1)
            idle = served.connect()
            idle.sendall(before + begun)
            while idle.recv(4096):
                pass
            idle.close()
            # those who wait for an answer are no such
            assert service.batcher.n_busy == 1
            asked.close()
    finally:
        service.batcher.close()


class Cycle:
    """A request of a connection."""

    def __init__(self, **state: bool) -> None:
        self.response_complete = self.response_started = True
        self.more_body = False
        self.__dict__ |= state


class Line:
    """A connection of uvicorn, as far as it is looked at."""

    def __init__(self) -> None:
        self.cycle: Cycle | None = None
        self.flow = SimpleNamespace(write_paused=False)
        self.transport = self
        self.unread, self.is_closed = 0, False

    def get_write_buffer_size(self) -> int:
        return self.unread

    def abort(self) -> None:
        self.is_closed = True

    def ask(self, **state: bool) -> None:
        self.cycle = Cycle(**state)


@pytest.fixture
def looked_at(monkeypatch):
    """A connection, and what lets seconds go by."""
    http = server.HttpServer(create_app(FakeService()))
    line, now = Line(), [0.0]
    http.server_state.connections.add(line)
    monkeypatch.setattr(server.time, "monotonic", lambda: now[0])

    def go_by(seconds: float) -> bool:
        """Whether it is closed then."""
        http._close_silent()
        now[0] += seconds
        http._close_silent()
        return line.is_closed

    return line, go_by


def test_who_asks_again_and_again_is_not_closed_between_two_questions(looked_at):
    line, go_by = looked_at
    for _ in range(9):
        line.ask()
        assert not go_by(20)
    # a question whose end is not there
    line.ask(response_complete=False, response_started=False, more_body=True)
    assert not go_by(59)
    assert go_by(1)


def test_who_never_reads_an_answer_is_closed(looked_at):
    line, go_by = looked_at
    line.ask(response_complete=False)
    assert not go_by(9_999)
    line.flow.write_paused = True
    for unread in (900, 800, 700):
        line.unread = unread
        assert not go_by(299)
    assert go_by(1)
