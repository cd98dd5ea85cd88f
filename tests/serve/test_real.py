"""`caravan serve` with a model over two workers: clients, curl as the page shows it, the end."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import openai
import pytest

from caravan.worker.local import Worker
from e2e import architectures
from e2e.processes import Command, assert_one_line, caravan, kill, running, session_of, wait_for
from serve.serving import asking

PAGE = Path(__file__).parent.parent.parent / "docs" / "server.md"
QUESTION = [{"role": "user", "content": "Name three colours."}]
BOUND = 60.0


def url_of(server: Command) -> str:
    wait_for(lambda: server.text.endswith("\n") or server.process.poll() is not None)
    found = re.fullmatch(r"serving \S+ at (http://\S+)\n", server.text)
    assert found, (server.text, server.lines)
    return found[1]


@contextmanager
def serving(*options: str) -> Iterator[tuple[Command, str]]:
    with running("serve", "--port", "0", *options) as server:
        yield server, url_of(server)


@pytest.fixture(scope="module")
def url(smollm2) -> Iterator[str]:
    options = ("-m", str(smollm2), "-t", "1", "-c", "512", "-q")
    options += ("--local-workers=2", "--split=memory")
    with serving(*options) as (_, found):
        yield found


@pytest.fixture
def client(url) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=BOUND, max_retries=0) as found:
        yield found


def chat(client: openai.OpenAI, **options):
    options = {"messages": QUESTION, "max_tokens": 12, "temperature": 0, **options}
    return client.chat.completions.create(model="any", **options)


def busy(url: str) -> int:
    return sum(slot["is_processing"] for slot in httpx.get(f"{url}/slots").json())


def test_a_chat_and_its_stream(client):
    whole = chat(client)
    assert whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"
    with chat(client, stream=True, stream_options={"include_usage": True}) as stream:
        *chunks, last = stream
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    # the slot has it still
    assert last.usage.prompt_tokens_details.cached_tokens > 0


def test_logprobs_are_those_of_the_text(client):
    (choice,) = chat(client, logprobs=True, top_logprobs=3).choices
    told = choice.logprobs.content
    assert b"".join(bytes(token.bytes) for token in told).decode() == choice.message.content
    for token in told:
        # greedy takes the most likely one
        assert (token.top_logprobs[0].token, token.top_logprobs[0].logprob) == (
            token.token,
            token.logprob,
        )
        assert len(token.top_logprobs) == 3
        assert token.logprob <= 0
    answer = client.completions.create(
        model="any", prompt="The sun", max_tokens=4, temperature=0, logprobs=2
    )
    assert "".join(answer.choices[0].logprobs.tokens) == answer.choices[0].text


def test_a_seed_makes_the_same_text_again(client):
    def text(seed: int) -> str:
        return chat(client, temperature=1.5, seed=seed).choices[0].message.content

    # from then on the prompt is read in the same way each time
    text(1)
    assert text(11) == text(11)
    assert len({text(seed) for seed in range(4)}) > 1


def test_many_at_once_get_what_each_gets_alone(client):
    prompts = [f"{n} camels and {n + 1} camels are" for n in range(8)]

    def complete(prompt: str) -> str:
        answer = client.completions.create(
            model="any", prompt=prompt, max_tokens=6, temperature=0, logit_bias={"198": -100}
        )
        return answer.choices[0].text

    alone = [complete(prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(complete, prompts))
    assert together == alone


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up_frees_its_slots(stream, url):
    body = {"prompt": "Once", "max_tokens": -1, "n": 3, "stream": stream, "ignore_eos": True}
    with asking(int(url.rpartition(":")[2]), "/v1/completions", body):
        wait_for(lambda: busy(url) == 3)
    wait_for(lambda: busy(url) == 0)


SCHEMA = {
    "type": "object",
    "properties": {"red": {"type": "integer"}, "name": {"enum": ["ruby", "sand"]}},
    "required": ["red", "name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [True, False])
def test_json_as_the_schema_says(stream, client):
    wanted = {"type": "json_schema", "json_schema": {"name": "colour", "schema": SCHEMA}}
    options = {"max_tokens": 60, "response_format": wanted, "stream": stream}
    if stream:
        with chat(client, **options) as chunks:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    else:
        (choice,) = chat(client, **options).choices
        assert choice.finish_reason == "stop"
        text = choice.message.content
    found = json.loads(text)
    assert set(found) == {"red", "name"}
    assert isinstance(found["red"], int) and found["name"] in ("ruby", "sand")


def test_an_answer_that_has_to_be_a_call(client):
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"place": {"enum": ["Paris", "Rome"]}},
                    "required": ["place"],
                },
            },
        }
        for name in ("weather", "time")
    ]
    named = {"type": "function", "function": {"name": "time"}}
    for choice, names in (("required", ("weather", "time")), (named, ("time",))):
        (answer,) = chat(client, tools=tools, tool_choice=choice, max_tokens=80).choices
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name in names
        assert json.loads(call.function.arguments)["place"] in ("Paris", "Rome")


def test_vectors_of_texts(client):
    texts = ["The cat sleeps on the sofa.", "A cat is sleeping on a couch.", "Stocks fell today."]
    cat, same, other = (
        item.embedding for item in client.embeddings.create(model="any", input=texts).data
    )

    def product(one: list[float], two: list[float]) -> float:
        return sum(a * b for a, b in zip(one, two, strict=True))

    assert product(cat, cat) == pytest.approx(1, abs=1e-5)
    assert product(cat, same) > product(cat, other)
    (again,) = client.embeddings.create(model="any", input=[texts[0]], encoding_format="float").data
    assert product(cat, again.embedding) == pytest.approx(1, abs=1e-3)


def test_what_the_model_cannot_read_is_refused(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="any", prompt="word " * 600)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="vocabulary"):
        client.completions.create(model="any", prompt=[49152])
    assert chat(client, max_tokens=1).usage.completion_tokens == 1


def test_the_page_and_the_cluster_are_there(url):
    assert "<html" in httpx.get(f"{url}/").text
    devices = httpx.get(f"{url}/cluster").json()["devices"]
    assert [device["name"] for device in devices] == ["RPC0", "RPC1"]


def commands() -> list[str]:
    """All curl commands of the page."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    return [part for block in blocks for part in re.split(r"^(?=curl )", block, flags=re.M)]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_commands_of_the_page_work(url):
    found = [command for command in commands() if command.startswith("curl ")]
    assert len(found) >= 10
    for command in found:
        shown = command.replace("http://127.0.0.1:8080", url)
        done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, timeout=BOUND)
        assert done.returncode == 0, command
        assert done.stdout and '"error"' not in done.stdout, (command, done.stdout)
        if '"stream": true' in command:
            assert done.stdout.endswith("data: [DONE]\n\n")
        elif "/metrics" not in command:
            json.loads(done.stdout)


# beginning and end


@pytest.fixture
def alone(smollm2) -> tuple[str, ...]:
    """A server that is there at once: no workers."""
    return ("-m", str(smollm2), "-dev", "none", "-c", "256", "--slots", "2", "-t", "1")


@pytest.mark.parametrize("signal", [2, 15])
def test_a_signal_lets_streams_go_on_and_ends_with_0(signal, alone):
    body = {"prompt": "Once", "max_tokens": 40, "stream": True, "ignore_eos": True}
    with serving(*alone, "--log-requests", "--alias", "m", "--api-key", "k") as (server, url):
        headers = {"authorization": "Bearer k"}
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=BOUND
        ) as reply:
            lines = reply.iter_lines()
            next(lines)
            kill(server.process.pid, signal)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert httpx_fails(url)
        assert server.finish() == 0
        assert server.text.startswith("serving m at ")
        (line,) = server.lines
        assert re.fullmatch(r"caravan: 127\.0\.0\.1 POST /v1/completions 200 \d+\.\d+ s", line)


def httpx_fails(url: str) -> bool:
    try:
        httpx.get(f"{url}/health")
    except httpx.TransportError:
        return True
    return False


def test_the_end_of_the_drain_is_an_error_in_the_stream(alone):
    body = {"prompt": "Once", "max_tokens": -1, "stream": True, "ignore_eos": True}
    with serving(*alone, "--drain-seconds", "0.1") as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND) as reply:
            lines = reply.iter_lines()
            next(lines)
            kill(server.process.pid, 15)
            data = [line for line in lines if line.startswith("data: ")]
        assert json.loads(data[-1][6:])["error"]["code"] == "shutting_down"
        assert server.finish() == 0
        assert server.lines == []


def test_a_second_signal_ends_at_once(alone):
    body = {"prompt": "Once", "max_tokens": -1, "stream": True, "ignore_eos": True}
    with serving(*alone, "-c", "8192", "--local-workers", "1", "-q") as (server, url):
        server.meet_family()
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND) as reply:
            lines = reply.iter_lines()
            next(lines)
            kill(server.process.pid, 2)
            wait_for(lambda: httpx_fails(url))
            kill(server.process.pid, 2)
            assert server.finish() == 130


def test_a_worker_that_is_gone_for_good_ends_it(smollm2):
    """Every answer with it, in a word."""
    body = {"prompt": "Once", "max_tokens": -1, "stream": True, "ignore_eos": True}
    options = ("-m", str(smollm2), "-c", "256", "-q", "--no-resume")
    options += ("--local-workers=2", "--split=memory")
    with serving(*options) as (server, url):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND) as reply:
            lines = reply.iter_lines()
            next(lines)
            kill(server.meet_family()[0])
            data = [line for line in lines if line.startswith("data: ")]
        assert json.loads(data[-1][6:])["error"]["code"] == "worker_lost"
        # the slots of another context notice it when they are needed
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "Once"}, timeout=BOUND)
        assert reply.json()["error"]["code"] == "worker_lost"
        assert server.finish() == 1
        (line,) = server.lines
        assert line.startswith("caravan: error: lost RPC")


def test_a_worker_that_dies_under_load_makes_eight_streams_pause(smollm2):
    """None fails, repeats or loses anything: grammars say what each of them has to be."""
    told = [" ".join(f"{number}{letter}" for letter in "abcdefghijklmnop") for number in range(8)]
    started = threading.Semaphore(0)

    def ask(url: str, number: int) -> str:
        body = {
            "prompt": f"Stream {number}:",
            "grammar": f'root ::= "{told[number]}"',
            "max_tokens": -1,
            "stream": True,
        }
        text = ""
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=BOUND) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    text += choice["text"]
                    started.release()
        return text

    with Worker("CPU:1") as one, Worker("CPU:1") as other, ThreadPoolExecutor(8) as pool:
        endpoints = f"{one.endpoint},{other.endpoint}"
        options = ("-m", str(smollm2), "--rpc", endpoints, "-np", "8", "-c", "256")
        options += ("--split=memory",)
        with serving(*options) as (server, url):
            answers = [pool.submit(ask, url, number) for number in range(8)]
            for _ in range(16):
                assert started.acquire(timeout=BOUND)
            assert busy(url) == 8
            kill(session_of(other))
            assert [answer.result(BOUND) for answer in answers] == told
            lost = [line for line in server.lines if "lost" in line]
            assert len(lost) == 1 and ": back after" in lost[0]
            metrics = httpx.get(f"{url}/metrics").text
            assert "caravan_worker_losses_total 1.0" in metrics
            assert 'caravan_requests_total{finish="eog"} 8.0' in metrics


def test_the_end_does_not_wait_for_a_lost_worker(smollm2):
    body = {"prompt": "Once", "max_tokens": -1, "ignore_eos": True}
    with Worker("CPU:1") as worker:
        options = ("-m", str(smollm2), "--rpc", worker.endpoint, "-c", "256")
        with serving(*options, "--resume-wait", "600", "--drain-seconds", "0.1") as (server, url):
            with asking(int(url.rpartition(":")[2]), "/v1/completions", body) as connection:
                wait_for(lambda: busy(url) == 1)
                worker.close()
                wait_for(lambda: server.says("waiting for it, 600 s at most"))
                assert httpx.post(f"{url}/tokenize", json={"content": "a"}).status_code == 200
                kill(server.process.pid, 15)
                assert b"shutting_down" in connection.makefile("rb").read()
            assert server.finish() == 0


def test_keys_come_from_files_and_the_environment(alone, tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\nsecond\n")
    for options, variable, keys in (
        (("--api-key-file", str(file)), "third", ("first", "second")),
        ((), "third, fourth", ("third", "fourth")),
    ):
        monkeypatch.setenv("CARAVAN_API_KEY", variable)
        with serving(*alone, "--host", "0.0.0.0", *options) as (server, url):
            url = url.replace("0.0.0.0", "127.0.0.1")
            assert httpx.get(f"{url}/v1/models").status_code == 401
            for key in keys:
                headers = {"authorization": f"Bearer {key}"}
                assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200
            assert server.lines == []


def test_an_open_door_is_told_of(alone):
    with serving(*alone, "--host", "0.0.0.0") as (server, _):
        assert server.says("everybody who reaches this address")


def test_what_cannot_be_is_told_before_anything_is_loaded(alone, tmp_path):
    missing = str(tmp_path / "none")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert_one_line(caravan("serve", *alone, "--port", port), "cannot listen", port)
    assert_one_line(caravan("serve", *alone, "--host", "192.0.2.1"), "cannot listen on 192.0.2.1")
    for options, word in (
        (("--api-key-file", missing), missing),
        (("--api-key", ""), "is empty"),
        (("--api-key", "a b"), "characters"),
        (("--chat-template", missing), missing),
    ):
        done = caravan("serve", *alone, "--port", "0", *options)
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert word in line


def test_a_model_for_embeddings_alone(tmp_path):
    path = tmp_path / "model.gguf"
    architectures.make(path, "nomic-bert", vocabulary=True)
    with serving("-m", str(path), "--local-workers=2", "--split=memory") as (_, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            found = client.embeddings.create(model="x", input=["a camel", "a"]).data
            assert [len(one.embedding) for one in found] == [64, 64]
            with pytest.raises(openai.BadRequestError, match="continues no texts"):
                client.completions.create(model="x", prompt="a")
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        assert httpx.get(f"{url}/slots").json() == []
        assert httpx.get(f"{url}/cluster").json()["work"]["slots"] == []
        assert httpx.get(url).status_code == 200
