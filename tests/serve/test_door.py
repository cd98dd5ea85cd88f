"""Who may come in, and with how much."""

from __future__ import annotations

import httpx
import openai
import pytest

from serve.fakes import FakeService
from serve.serving import Served, serving

KEYS = ("first-key", "second-key")
OPEN = ("/health", "/v1/health")
CLOSED = ("/v1/models", "/models", "/metrics", "/props", "/slots", "/nothing", "/healthy")


@pytest.fixture
def locked():
    service = FakeService()
    try:
        with serving(service, keys=KEYS, most_body_bytes=1000) as served:
            yield served
    finally:
        service.batcher.close()


def test_without_the_key_there_is_nothing_but_health(locked):
    for path in OPEN:
        assert locked.get(path).status_code == 200
    for path in CLOSED:
        reply = locked.get(path)
        assert reply.status_code == 401
        error = reply.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert reply.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/chat/completions", "/tokenize"):
        # the key comes before the question
        assert locked.post(path, {"nonsense": 1}).status_code == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"authorization": "Bearer first-key"}, 200),
        ({"authorization": "bearer  second-key"}, 200),
        ({"authorization": "Bearer first-kéy".encode("latin-1")}, 401),
        ({"x-api-key": "first-key"}, 200),
        ({"authorization": "Bearer"}, 401),
        ({"authorization": "Bearer first-ke"}, 401),
        ({"authorization": "Bearer first-key2"}, 401),
        ({"authorization": "Basic first-key"}, 401),
        ({"authorization": "Bearer FIRST-KEY"}, 401),
    ],
)
def test_any_of_the_keys_opens(headers, status, locked):
    assert locked.get("/v1/models", headers=headers).status_code == status


def test_the_official_client_with_a_key(locked):
    with locked.openai("first-key") as client:
        assert [model.id for model in client.models.list()] == ["fake"]
    with locked.openai("wrong") as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_keys_are_told_to_nobody(locked):
    texts = [locked.get(path).text for path in (*OPEN, *CLOSED)]
    assert not any(key in text for key in KEYS for text in texts)


@pytest.mark.parametrize("told", [True, False])
def test_bodies_are_bounded(told, locked: Served):
    """Also those that do not say beforehand how long they are."""
    data = b'{"prompt": "' + b"a" * 1000 + b'"}'
    headers = {"content-type": "application/json", "x-api-key": "first-key"}
    content = data if told else iter([data[:500], data[500:]])
    reply = httpx.post(f"{locked.url}/v1/completions", content=content, headers=headers)
    assert reply.status_code == 413
    assert "larger than 1000 bytes" in reply.json()["error"]["message"]
    assert locked.get("/health").status_code == 200


def test_other_names_for_this_machine_are_none_of_it():
    """A page elsewhere may have its own name lead to loopback, and ask as if it came from here."""
    with serving(FakeService(), local_only=True) as served:
        port = served.port
        for host, status in (
            ("127.0.0.1", 200),
            (f"127.0.0.1:{port}", 200),
            (f"localhost:{port}", 200),
            (f"LOCALHOST:{port}", 200),
            (f"caravan.localhost:{port}", 200),
            (f"[::1]:{port}", 200),
            ("[::1]", 200),
            (f"evil.example:{port}", 403),
            ("localhost.evil.example", 403),
            (f"192.0.2.1:{port}", 403),
            ("127.0.0.1.evil.example", 403),
        ):
            reply = served.get("/v1/models", headers={"host": host})
            assert reply.status_code == status, host
        assert reply.json()["error"]["code"] == "wrong_host"
    with serving(FakeService()) as served:
        assert served.get("/v1/models", headers={"host": "evil.example"}).status_code == 200


def preflight(served: Served) -> httpx.Response:
    headers = {
        "origin": "https://page.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    return httpx.options(f"{served.url}/v1/chat/completions", headers=headers)


def test_pages_of_other_origins_may_not_ask(served):
    reply = preflight(served)
    assert reply.status_code == 405
    assert "access-control-allow-origin" not in reply.headers
    reply = served.get("/v1/models", headers={"origin": "https://page.example"})
    assert "access-control-allow-origin" not in reply.headers


@pytest.mark.parametrize("origin", ["https://page.example", "*"])
def test_pages_of_origins_that_are_named_may(origin):
    with serving(FakeService(), cors_origins=[origin], keys=KEYS) as served:
        reply = preflight(served)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == origin
        # errors can be read, too
        reply = served.get("/v1/models", headers={"origin": "https://page.example"})
        assert reply.status_code == 401
        assert reply.headers["access-control-allow-origin"] == origin


def test_requests_can_be_logged():
    lines = []
    with serving(FakeService(), log=lambda *line: lines.append(line)) as served:
        served.get("/health?x=1")
        served.get("/nothing")
    ((*first, seconds, client), second) = lines
    assert first == ["GET", "/health", 200]
    assert (seconds > 0, client) == (True, "127.0.0.1")
    assert second[:3] == ("GET", "/nothing", 404)
