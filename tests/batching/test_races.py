"""Requests that are submitted, cancelled and cut off by the end of their batcher, all at once."""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from caravan.batching import Batcher, Chunk, Job, Request
from caravan.errors import ContextError, QueueFull
from caravan.llm import ContextParams, Model, SamplingParams
from e2e import tiny

PARAMS = ContextParams(n_batch=64, n_ubatch=32, n_threads=1)
BOUND = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model(tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")) as model:
        yield model


class Client:
    """One that has a job, and may cancel it in the middle of a token, or break."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.chunks: list[Chunk] = []
        self.job: Job | None = None

    def __call__(self, chunk: Chunk) -> None:
        self.chunks.append(chunk)
        if self.how == "in the sink" and self.job is not None:
            self.job.cancel()
        if self.how == "breaks":
            raise RuntimeError("a sink that breaks")


@pytest.mark.parametrize("seed", range(6))
def test_every_request_ends_once_whatever_happens_meanwhile(seed, model):
    chance = random.Random(seed)
    batcher = Batcher(
        model, n_slots=chance.randint(1, 4), n_ctx=256, n_lanes=2, queue=8, params=PARAMS
    )
    clients: list[Client] = []
    # so far everybody comes before the end
    enough = threading.Event()

    def come(seed: int) -> None:
        own = random.Random(seed)
        for _ in range(30):
            client = Client(own.choice(["at once", "in the sink", "breaks", "another", "not"]))
            size = own.choice([1, 5, 40, 256])
            prompt = tuple(own.randrange(10, 400) for _ in range(size))
            sampling = SamplingParams(temp=0)
            try:
                client.job = batcher.submit(
                    Request(prompt, own.choice([0, 1, 9]), sampling), client
                )
            except QueueFull:
                continue
            except ContextError:
                return
            clients.append(client)
            if client.how == "at once":
                client.job.cancel()
            if client.how == "another" and (other := own.choice(clients).job) is not None:
                other.cancel()
            if len(clients) > 40:
                enough.set()
        enough.set()

    threads = [threading.Thread(target=come, args=(seed * 10 + n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    if seed % 2:
        assert enough.wait(BOUND)
    batcher.close()
    for thread in threads:
        thread.join(BOUND)
        assert not thread.is_alive()
    for client in clients:
        assert [bool(chunk.finish) for chunk in client.chunks].count(True) == 1
        assert client.chunks[-1].finish
    state = batcher.state()
    assert (state.queued, any(slot.busy for slot in state.slots)) == (0, False)
    assert sum(state.finished.values()) == len(clients)


def test_nobody_is_taken_from_the_queue_twice(model):
    """Lanes take from it, and clients leave it, while the batcher ends."""
    batcher = Batcher(model, n_slots=1, n_ctx=256, queue=8, params=PARAMS)

    class Guarded(deque):
        def popleft(self):
            assert batcher._lock.locked()
            return super().popleft()

    batcher._queue = Guarded()
    clients = [Client("not") for _ in range(4)]
    for client in clients:
        batcher.submit(Request((20,), -1, SamplingParams(temp=0, ignore_eos=True)), client)
    batcher.close()
    assert [client.chunks[-1].finish for client in clients[1:]] == ["cancelled"] * 3
