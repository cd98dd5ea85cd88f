"""Workers are lost in every phase, and the text is the one that it would have been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import WorkerLost
from caravan.llm import Context, ContextParams, Model, ModelParams, SamplingParams
from caravan.llm.resume import Resume, Resumed
from e2e.processes import children, kill, session_of, wait_for

PARAMS = ContextParams(n_ctx=512, n_batch=64, n_ubatch=32)
# two calls of the engine
N_PROMPT = 70
N_GEN = 14
GREEDY = SamplingParams(temp=0)
SEEDED = SamplingParams(temp=1.0, seed=3, repeat_penalty=1.2)
# the grammar belongs to a vocabulary, which is another one after a loss
BOUND = SamplingParams(temp=1.0, seed=3, grammar='root ::= (" " [A-Z] [a-z]+)+')


def supervisor_of(worker: caravan.Worker) -> int:
    return worker.pid


VICTIMS = {"session": session_of, "worker": supervisor_of}


@pytest.fixture
def pair() -> Iterator[list[caravan.Worker]]:
    """Two workers of this process; one that is killed is started anew."""
    with caravan.LocalWorkers(2) as workers:
        yield workers.workers


@pytest.fixture(scope="module")
def lasting() -> Iterator[list[caravan.Worker]]:
    with caravan.LocalWorkers(2) as workers:
        yield workers.workers


@pytest.fixture
def kept(lasting) -> list[caravan.Worker]:
    """Two workers that serve nobody, for tests that end none of them but their sessions only."""
    for worker in lasting:
        wait_for(lambda worker=worker: len(children(worker.pid)) == 1)
    return lasting


@pytest.fixture
def victims(request, kept, kind) -> list[caravan.Worker]:
    """Two workers whose sessions, or they themselves, are killed."""
    return kept if kind == "session" else request.getfixturevalue("pair")


@pytest.fixture(scope="module")
def texts(smollm2: Path, tokens: list[int]) -> dict[SamplingParams, list[str]]:
    """The pieces of text of undisturbed runs."""
    found = {}
    with (
        caravan.LocalWorkers(2) as workers,
        caravan.connect(workers.endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        for sampling in (GREEDY, SEEDED, BOUND):
            with Context(model, PARAMS) as context:
                found[sampling] = [*pieces(context, tokens, sampling)]
    return found


def pieces(context: Context, tokens: list[int], sampling: SamplingParams = GREEDY, **options):
    return caravan.generate(context, tokens, max_tokens=N_GEN, sampling=sampling, **options)


def endpoints(workers: list[caravan.Worker]) -> list[str]:
    return [worker.endpoint for worker in workers]


class Killer:
    """Kills when its time has come, once."""

    def __init__(self, pid: Callable[[], int]) -> None:
        self._pid = pid
        self.done = False

    def __call__(self) -> None:
        if not self.done:
            self.done = True
            kill(self._pid())


@pytest.mark.parametrize(
    ("which", "kind", "sampling"),
    [
        (0, "session", GREEDY),
        (1, "worker", GREEDY),
        (0, "worker", SEEDED),
        (1, "session", SEEDED),
        (1, "session", BOUND),
    ],
    ids=lambda value: "" if isinstance(value, SamplingParams) else str(value),
)
def test_lost_while_decoding(victims, which, kind, sampling, smollm2, tokens, texts):
    victim = VICTIMS[kind]
    stats = caravan.GenerationStats()
    with (
        caravan.connect(endpoints(victims)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, sampling, resume=True, stats=stats)
        seen = [next(running) for _ in range(8)]
        kill(victim(victims[which]))
        seen += running
        assert seen == texts[sampling]
        (resumed,) = stats.resumes
        assert_tells(resumed, victims[which].endpoint, f"RPC{which}")
        assert resumed.n_tokens in range(N_PROMPT + 7, N_PROMPT + N_GEN)
        assert (resumed.gone, resumed.devices) == ({}, ("RPC0", "RPC1"))
        assert "back after" in str(resumed)
        # nothing of the first ones is left
        weights = [device.allocated()["weights"] for device in cluster.devices]
        assert 0.9 < sum(weights) / model.size < 1.1


def assert_tells(resumed: Resumed, endpoint: str, device: str) -> None:
    lost = resumed.lost
    assert (lost.endpoint, lost.device) == (endpoint, device)
    assert lost.command
    assert str(resumed).startswith(f"{device} at {endpoint} was lost during {lost.command} (")


@pytest.mark.parametrize(("which", "kind"), [(0, "session"), (1, "worker")])
def test_lost_in_the_prompt(victims, which, kind, smollm2, tokens, texts):
    victim = VICTIMS[kind]
    with (
        caravan.connect(endpoints(victims)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        strike, read = Killer(lambda: victim(victims[which])), context._read

        def reading(*arguments) -> None:
            read(*arguments)
            strike()

        context._read = reading
        stats = caravan.GenerationStats()
        assert [*pieces(context, tokens, resume=True, stats=stats)] == texts[GREEDY]
        assert strike.done
        assert 1 <= len(stats.resumes) <= 2
        assert stats.n_prompt == N_PROMPT


@pytest.mark.parametrize(("at", "which", "kind"), [(1, 0, "worker"), (40, 1, "session")])
def test_lost_while_loading(victims, at, which, kind, smollm2, tokens, texts):
    victim = VICTIMS[kind]
    told: list[Resumed] = []
    calls: list[float] = []

    def progress(fraction: float) -> bool:
        calls.append(fraction)
        if len(calls) == at:
            kill(victim(victims[which]))
        return True

    with (
        caravan.connect(endpoints(victims)) as cluster,
        Model(
            smollm2,
            devices=cluster.devices,
            progress=progress,
            resume=Resume(on_resume=told.append),
        ) as model,
        Context(model, PARAMS) as context,
    ):
        assert [*pieces(context, tokens)] == texts[GREEDY]
    (resumed,) = told
    assert_tells(resumed, victims[which].endpoint, f"RPC{which}")
    assert resumed.n_tokens == 0
    assert "replayed" not in str(resumed)


def test_lost_before_a_context_is_made(kept, smollm2, tokens, texts):
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices, resume=True) as model,
    ):
        kill(session_of(kept[0]))
        wait_for(lambda: cluster.devices[0].connection.lost)
        with Context(model, PARAMS) as context:
            assert [*pieces(context, tokens)] == texts[GREEDY]


def test_both_are_lost(pair, smollm2, tokens, texts):
    stats = caravan.GenerationStats()
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=True, stats=stats)
        seen = [next(running) for _ in range(4)]
        kill(session_of(pair[0]))
        kill(pair[1].pid)
        for device in cluster.devices:
            wait_for(lambda device=device: device.connection.lost)
        seen += running
        assert seen == texts[GREEDY]
        (resumed,) = stats.resumes
        assert {resumed.lost.device, *resumed.also} == {"RPC0", "RPC1"}


def test_lost_again_and_again(kept, smollm2, tokens, texts):
    """Also while it is being brought back."""
    stats = caravan.GenerationStats()
    loads: list[float] = []
    strikes: list[int] = []

    def progress(fraction: float) -> bool:
        # of the second load
        if loads and fraction < loads[-1] and not strikes:
            strikes.append(session_of(kept[1]))
            kill(strikes[0])
        loads.append(fraction)
        return True

    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices, progress=progress) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=True, stats=stats)
        seen = [next(running) for _ in range(4)]
        kill(session_of(kept[0]))
        seen += [next(running) for _ in range(4)]
        assert strikes
        kill(session_of(kept[1]))
        seen += running
        assert seen == texts[GREEDY]
        assert len(stats.resumes) == 2


def test_lost_while_it_is_replayed(kept, smollm2, tokens, texts, monkeypatch):
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        strike, replay = Killer(lambda: session_of(kept[1])), context._replay

        def replaying(raw) -> None:
            strike()
            replay(raw)

        context._replay = replaying
        running = pieces(context, tokens, resume=True)
        seen = [next(running) for _ in range(4)]
        kill(session_of(kept[0]))
        seen += running
        assert strike.done
        assert seen == texts[GREEDY]


def test_gone_for_good(pair, smollm2, tokens, texts):
    """The other one takes all of it; the shares that were given hold no more."""
    stats = caravan.GenerationStats()
    waits: list[float] = []
    resume = Resume(wait=1.5, on_wait=lambda lost, seconds: waits.append(seconds))
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, ModelParams(tensor_split=(3, 1)), devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=resume, stats=stats)
        seen = [next(running) for _ in range(8)]
        pair[0].close()
        seen += running
        assert seen == texts[GREEDY]
        (resumed,) = stats.resumes
        assert resumed.devices == ("RPC1",)
        assert "refused" in resumed.gone["RPC0"]
        assert "RPC0 did not come back (cannot connect to" in str(resumed)
        assert waits == [1.5]
        assert model.devices == (cluster.devices[1],)
        assert set(model.layer_devices()) == {"RPC1"}
        assert len(model.needs.devices) == 1
        # and it can be lost once more, and come back
        kill(session_of(pair[1]))
        context.clear()
        assert [*pieces(context, tokens, resume=True)] == texts[GREEDY]


def test_gone_and_nothing_left(pair, smollm2, tokens):
    with (
        caravan.connect([pair[0].endpoint]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=Resume(wait=0.2))
        next(running)
        pair[0].close()
        with pytest.raises(WorkerLost, match=r"lost RPC0 .*; it did not come back: .*refused"):
            list(running)
        # as before: it may be tried again, and without resume it is lost
        for call in (context.synchronize, lambda: context.decode([1]), lambda: Context(model)):
            with pytest.raises(WorkerLost):
                call()
        assert model.piece(tokens[0])


def test_what_is_left_is_too_small(smollm2, tokens):
    with (
        caravan.Worker("CPU:1", options=("--max-memory", "80M")) as small,
        caravan.Worker("CPU:1") as large,
        caravan.connect([small.endpoint, large.endpoint]) as cluster,
        Model(smollm2, ModelParams(tensor_split=(1, 9)), devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=Resume(wait=0.2))
        next(running)
        large.close()
        with pytest.raises(WorkerLost, match=r"and without it .* does not fit: RPC0 .*lacks"):
            list(running)
        assert len(model.devices) == 2


def test_a_worker_that_comes_back_as_another(pair, smollm2, tokens, texts):
    stats = caravan.GenerationStats()
    port = int(pair[1].endpoint.rpartition(":")[2])
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=True, stats=stats)
        seen = [next(running) for _ in range(8)]
        pair[1].close()
        with caravan.Worker("CPU:1,CPU:1", port=port):
            seen += running
        assert seen == texts[GREEDY]
        assert "came back with 2 devices instead of 1" in stats.resumes[0].gone["RPC1"]


def test_a_local_device_is_lost(smollm2, tokens, texts, scratch):
    stats = caravan.GenerationStats()
    with (
        caravan.connect(["local:CPU:1", "local:CPU:1"]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=True, stats=stats)
        seen = [next(running) for _ in range(8)]
        from caravan.worker import local

        kill(local._ours[cluster.endpoints[1]].pid)
        seen += running
        assert seen == texts[GREEDY]
        assert stats.resumes[0].lost.device == "local:CPU:1#2"


def test_with_the_base_protocol(kept, smollm2, tokens, texts):
    with (
        caravan.connect(endpoints(kept), extension=False) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=True)
        seen = [next(running) for _ in range(8)]
        kill(session_of(kept[0]))
        seen += running
        assert seen == texts[GREEDY]


def test_stop_texts_across_the_loss(kept, smollm2, tokens, texts):
    """What may become a stop text is held back, over the loss as well."""
    whole = "".join(texts[GREEDY])
    stop = whole[len("".join(texts[GREEDY][:6])) : len("".join(texts[GREEDY][:10]))]
    stats = caravan.GenerationStats()
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        model.is_eog, steps = model.is_eog, []
        is_eog = model.is_eog

        def counted(token: int) -> bool:
            steps.append(token)
            if len(steps) == 8:
                kill(session_of(kept[0]))
            return is_eog(token)

        model.is_eog = counted
        text = "".join(pieces(context, tokens, resume=True, stats=stats, stop=[stop]))
        assert text == whole[: whole.index(stop)]
        assert (stats.stopped, len(stats.resumes)) == ("stop", 1)


# without generate


def test_a_context_by_hand(kept, smollm2, tokens):
    """Rewinds, states that were restored, logits of many tokens: all that changes what it holds."""
    tokens = [*tokens, *tokens]

    def talk(context: Context, strike: Callable[[], None]) -> list[np.ndarray]:
        found = []
        context.decode(tokens[:100])
        context.decode(tokens[100:110], pos0=90)
        strike()
        found.append(context.logits())
        state = context.save_state()
        context.decode(tokens[110:120], logits="all")
        strike()
        found.append(context.logits(3))
        assert context.restore_state(state)
        context.rewind(96)
        context.decode_one(7)
        strike()
        context.decode_one(8)
        found.append(context.logits())
        context.clear()
        context.decode([1, 2, 3])
        strike()
        context.rewind(2)
        context.decode_one(9)
        found.append(context.logits())
        assert context.n_past == 3
        return found

    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
    ):
        told: list[Resumed] = []
        with Context(model, PARAMS) as undisturbed:
            expected = talk(undisturbed, lambda: None)
        with Context(model, PARAMS, resume=Resume(on_resume=told.append)) as context:

            def strike() -> None:
                kill(session_of(kept[len(told) % 2]))
                wait_for(lambda: any(d.connection.lost for d in cluster.devices))

            for got, wanted in zip(talk(context, strike), expected, strict=True):
                assert np.array_equal(got, wanted)
            assert len(told) >= 4


def test_what_is_read_again_is_the_same_to_the_bit(kept, smollm2, tokens):
    """Not only the text: the KV cache is."""
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=True)
        for _ in range(10):
            next(running)
        before = context.save_state()
        kill(session_of(kept[0]))
        wait_for(lambda: cluster.devices[0].connection.lost)
        with context.resuming(Resume()):
            context.synchronize()
            assert context.save_state() == before
        running.close()


def test_contexts_on_several_threads(kept, smollm2, tokens, texts):
    """Each comes back by itself; one that is not used meanwhile does when it is."""
    told: list[Resumed] = []
    resume = Resume(on_resume=told.append)
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices, resume=resume) as model,
        Context(model, PARAMS) as idle,
        Context(model, PARAMS, resume=False) as mortal,
    ):
        idle.decode(tokens[:40])
        expected = idle.logits()
        mortal.decode(tokens[:40])
        found: dict[int, str] = {}
        halfway = threading.Barrier(3)

        def talk(number: int) -> None:
            with Context(model, PARAMS) as context:
                running = pieces(context, tokens)
                seen = [next(running) for _ in range(5)]
                halfway.wait(30)
                found[number] = [*seen, *running]

        threads = [threading.Thread(target=talk, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        halfway.wait(30)
        kill(session_of(kept[0]))
        for thread in threads:
            thread.join(60)
        assert found == {0: texts[GREEDY], 1: texts[GREEDY]}
        assert np.array_equal(idle.logits(), expected)
        with pytest.raises(WorkerLost):
            mortal.logits()


def test_another_model_of_the_cluster(kept, smollm2, tokens, texts):
    """It notices by itself that its weights are lost, though the device has come back."""
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
        Model(smollm2, devices=cluster.devices) as other,
        Context(other, PARAMS) as aside,
    ):
        aside.decode(tokens[:40])
        running = pieces(context, tokens, resume=True)
        seen = [next(running) for _ in range(8)]
        kill(session_of(kept[0]))
        seen += running
        assert seen == texts[GREEDY]
        cluster.check()
        for call in (lambda: aside.decode([1]), aside.logits, lambda: Context(other, PARAMS)):
            with pytest.raises(WorkerLost):
                call()
        with aside.resuming(Resume()):
            aside.clear()
            assert [*pieces(aside, tokens)] == texts[GREEDY]


def test_a_worker_that_dies_of_every_attempt(kept, smollm2, tokens):
    """Something in the work itself may kill it: that must end."""
    with (
        caravan.connect(endpoints(kept)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        running = pieces(context, tokens, resume=Resume(most=2))
        next(running)
        read, calls = context._read, []

        def poison(*arguments) -> None:
            calls.append(1)
            kill(session_of(kept[0]))
            wait_for(lambda: cluster.devices[0].connection.lost)
            read(*arguments)

        context._read = poison
        with pytest.raises(WorkerLost, match="the loss number 3 in a row"):
            list(running)
        assert len(calls) == 3


def test_closed_while_it_waits(pair, smollm2, tokens):
    """From another thread."""
    waiting = threading.Event()
    resume = Resume(wait=600, on_wait=lambda lost, seconds: waiting.set())
    with caravan.connect([pair[0].endpoint]) as cluster:
        model = Model(smollm2, devices=cluster.devices)
        context = Context(model, PARAMS, resume=resume)
        context.decode(tokens[:4])
        context.synchronize()
        pair[0].close()
        errors = []

        def use() -> None:
            try:
                context.decode_one(1)
                context.synchronize()
            except WorkerLost as exc:
                errors.append(str(exc))

        thread = threading.Thread(target=use)
        thread.start()
        assert waiting.wait(30)
        model.close()
        thread.join(30)
        assert "closed while it was waited for" in errors[0]
