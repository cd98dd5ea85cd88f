"""How a model is brought back: who is waited for, for how long, and what is done without them."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass, field

import pytest

from caravan.errors import (
    AllocationError,
    AuthenticationError,
    ConnectError,
    DoesNotFit,
    LocalProtocolError,
    ModelError,
    ProtocolError,
    RemoteError,
    SessionEnded,
    UsageError,
    WorkerLost,
)
from caravan.llm import recovery
from caravan.llm.resume import Losses, Resume, Resumed, delays, is_refusal, policy
from caravan.wire.extension import Status

REFUSED = ConnectError("cannot connect to b:1: refused")


def loss(device: str = "RPC1") -> WorkerLost:
    return WorkerLost("b:1", device, "GRAPH_COMPUTE", OSError("reset"))


@dataclass(eq=False)
class FakeConnection:
    """Not there for the first attempts."""

    errors: list[Exception] = field(default_factory=list)
    lost: WorkerLost | None = None
    attempts: int = 0
    slow: threading.Event | None = None

    def reopen(self) -> None:
        self.attempts += 1
        if self.slow is not None:
            self.slow.wait(30)
        if self.errors:
            error = self.errors[0]
            if len(self.errors) > 1:
                del self.errors[0]
            if isinstance(error, Exception):
                raise error
        self.lost = None


@dataclass(eq=False)
class Device:
    name: str
    connection: FakeConnection | None


@dataclass
class Target:
    """Whatever is in `errors` goes wrong, one after the other; None: it does not."""

    devices: tuple[Device, ...]
    errors: list[Exception | None] = field(default_factory=list)
    unfit: Exception | None = None
    done: list[str] = field(default_factory=list)

    def put_on(self, devices) -> None:
        self.done.append("put on " + ",".join(device.name for device in devices))
        if self.unfit is not None:
            raise self.unfit
        self.devices = tuple(devices)

    def load(self) -> None:
        self.done.append("load")
        error = self.errors.pop(0) if self.errors else None
        if error is not None:
            for device in self.devices:
                if isinstance(error, WorkerLost) and device.name == error.device:
                    device.connection.lost = error
            raise error


@pytest.fixture
def target() -> Target:
    return Target(
        (
            Device("RPC0", FakeConnection()),
            Device("RPC1", FakeConnection(lost=loss())),
            Device("GPU0", None),
        )
    )


def bring_back(target: Target, **values) -> recovery.Back:
    resume = Resume(**{"wait": 0.0, **values})
    return recovery.bring_back(target, loss(), resume, Losses(), threading.Event())


@pytest.fixture(autouse=True)
def short_delays(monkeypatch):
    monkeypatch.setattr(recovery, "delays", lambda: itertools.repeat(0.001))
    monkeypatch.setattr(recovery, "_TICK", 0.001)
    monkeypatch.setattr(recovery, "_PATIENCE", 0.01)


def test_one_that_is_there_is_taken_at_once(target):
    waits = []
    back = bring_back(target, on_wait=lambda *told: waits.append(told))
    assert back == (("RPC1",), {})
    assert [d.connection.attempts for d in target.devices[:2]] == [0, 1]
    assert target.done == ["load"]
    assert waits == []


def test_one_is_waited_for(target):
    target.devices[1].connection.errors = [REFUSED] * 5 + [None]
    assert bring_back(target, wait=60.0).gone == {}
    assert target.devices[1].connection.attempts == 6


def test_one_whose_session_another_thread_has_opened(target):
    """Then nobody is lost any more, but the weights are."""
    target.devices[1].connection.lost = None
    assert bring_back(target) == ((), {})
    assert target.done == ["load"]


def test_after_the_wait_it_is_done_without(target):
    target.devices[1].connection.errors = [REFUSED]
    waits = []
    back = bring_back(target, wait=0.05, on_wait=lambda lost, seconds: waits.append(seconds))
    assert back == (("RPC1",), {"RPC1": str(REFUSED)})
    assert target.done == ["put on RPC0,GPU0", "load"]
    assert waits == [0.05]
    assert target.devices[0].connection.attempts == 0


@pytest.mark.parametrize(
    "error",
    [
        ProtocolError("came back as another"),
        AuthenticationError("came back with another token"),
        ValueError("a defect"),
    ],
)
def test_one_that_will_not_do_is_not_waited_for(target, error):
    connection = target.devices[1].connection
    connection.errors = [error]
    back = bring_back(target, wait=600.0)
    assert "another" in back.gone["RPC1"] or "a defect" in back.gone["RPC1"]
    assert connection.attempts == 1


def test_one_that_takes_too_long_is_done_without(target, monkeypatch):
    """What connects has bounds of its own, which may be longer."""
    monkeypatch.setattr(recovery, "_GRACE", 0.05)
    slow = target.devices[1].connection.slow = threading.Event()
    assert bring_back(target).gone == {"RPC1": "no answer"}
    slow.set()
    _join()


def test_several_are_waited_for_at_the_same_time(target):
    one, other = (device.connection for device in target.devices[:2])
    one.lost = loss("RPC0")
    both = threading.Barrier(2)

    class Meeting(threading.Event):
        def wait(self, timeout=None):
            both.wait(30)
            return True

    one.slow = other.slow = Meeting()
    assert bring_back(target) == (("RPC0", "RPC1"), {})


def test_nobody_left(target):
    target.devices = target.devices[1:2]
    target.devices[0].connection.errors = [REFUSED]
    with pytest.raises(
        WorkerLost, match=r"lost RPC1 .*; it did not come back: .*refused"
    ) as caught:
        bring_back(target)
    assert caught.value.outcome
    assert isinstance(caught.value.cause, OSError)
    assert target.done == []


def test_no_room_without_it(target):
    target.devices[1].connection.errors = [REFUSED]
    target.unfit = DoesNotFit("m.gguf does not fit: RPC0 lacks 1 GiB")
    with pytest.raises(WorkerLost, match=r"refused\), and without it m.gguf does not fit"):
        bring_back(target)
    assert len(target.devices) == 3


def test_a_loss_while_it_is_loaded_counts_again(target):
    target.errors = [loss("RPC0"), loss("RPC1"), None]
    assert bring_back(target, most=3).lost == ("RPC1", "RPC0")
    assert target.done == ["load"] * 3
    assert [d.connection.attempts for d in target.devices[:2]] == [1, 2]


def test_losses_without_end_end(target):
    target.errors = [loss()] * 10
    with pytest.raises(WorkerLost, match="that was the loss number 4 in a row"):
        bring_back(target, most=3)
    assert target.done == ["load"] * 4


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (RemoteError(Status.BAD_REQUEST, "a graph of 0 nodes"), True),
        (RemoteError(Status.COMPUTE_FAILED, "out of memory"), False),
        (RemoteError(Status.PEER_LOST, "RPC0"), False),
        (LocalProtocolError("4 GiB"), True),
        (SessionEnded("killed by signal 9"), False),
    ],
)
def test_what_would_be_refused_again_is_not_tried_again(target, cause, expected):
    lost = WorkerLost("b:1", "RPC1", "GRAPH_COMPUTE", cause)
    assert is_refusal(lost) == expected
    target.errors = [lost, None]
    if expected:
        with pytest.raises(WorkerLost) as caught:
            bring_back(target)
        assert caught.value is lost
    else:
        assert bring_back(target).lost == ("RPC1",)


def no_room() -> ModelError:
    error = ModelError("RPC1 has no room")
    error.__cause__ = AllocationError("no room")
    return error


def test_memory_that_a_dying_session_still_holds_is_waited_for(target):
    target.errors = [no_room(), no_room(), None]
    assert bring_back(target, wait=60.0).gone == {}
    assert target.done == ["load"] * 3


def test_memory_that_does_not_come(target):
    target.errors = [no_room()] * 1000
    with pytest.raises(WorkerLost, match="loading it again failed: RPC1 has no room"):
        bring_back(target, wait=0.05)


def test_a_file_that_is_no_model_any_more_is_tried_once(target):
    target.errors = [ModelError("m.gguf: not a GGUF file")]
    with pytest.raises(WorkerLost, match=r"failed: m\.gguf: not a GGUF"):
        bring_back(target, wait=600.0)
    assert target.done == ["load"]


def test_who_closes_it_does_not_wait(target):
    target.devices[1].connection.errors = [REFUSED]
    stop = threading.Event()
    resume = Resume(wait=600.0, on_wait=lambda *told: stop.set())
    with pytest.raises(WorkerLost, match="closed while it was waited for"):
        recovery.bring_back(target, loss(), resume, Losses(), stop)
    _join()


def test_ctrl_c_ends_the_wait(target):
    target.devices[1].connection.errors = [REFUSED]

    def press(*told) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring_back(target, wait=600.0, on_wait=press)
    _join()


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == "caravan-reconnect":
            thread.join(30)
            assert not thread.is_alive()


# values


def test_delays_grow_and_are_bounded():
    found = [*itertools.islice(delays(), 12)]
    assert found[0] <= 0.1
    assert found == sorted(found)
    assert found[-1] == found[-2] == 2.0
    assert sum(found) < 30


@pytest.mark.parametrize(
    "values", [{"wait": -1}, {"wait": float("nan")}, {"wait": float("inf")}, {"most": 0}]
)
def test_what_cannot_be_meant(values):
    with pytest.raises(UsageError, match=next(iter(values))):
        Resume(**values)


def test_the_words_for_a_policy():
    mine = Resume(wait=1)
    assert [policy(word) for word in (True, False, None, mine)] == [Resume(), None, None, mine]
    for word in (5, "yes", -1.0):
        with pytest.raises(UsageError, match="neither True nor False"):
            policy(word)


@pytest.mark.parametrize(
    ("names", "gone", "n_tokens", "expected"),
    [
        (("RPC1",), {}, 84, "back after 1.2 s, 84 tokens replayed"),
        ((), {}, 1, "back after 1.2 s, 1 token replayed"),
        (("RPC1",), {}, 0, "back after 1.2 s"),
        (
            ("RPC1",),
            {"RPC1": "refused"},
            84,
            "RPC1 did not come back (refused), on RPC0 after 1.2 s, 84 tokens replayed",
        ),
    ],
)
def test_a_loss_is_told_in_a_line(names, gone, n_tokens, expected):
    resumed = Resumed.of(loss(), names, gone, ("RPC0",), 1.234, n_tokens)
    assert str(resumed) == f"RPC1 at b:1 was lost during GRAPH_COMPUTE (reset): {expected}"


def test_what_was_lost_with_it_is_named():
    resumed = Resumed.of(loss("RPC1,RPC2"), ("RPC0", "RPC1", "RPC2"), {}, (), 0, 0)
    assert resumed.also == ("RPC0",)
    assert "(reset), and with it RPC0: back" in str(resumed)


def test_what_the_worker_says_of_its_end_is_told():
    lost = loss()
    lost.ask()
    lost.explain(SessionEnded("killed by signal 9"))
    told = lost.but("gone")
    assert str(told) == "lost RPC1 at b:1 during GRAPH_COMPUTE: killed by signal 9; gone"
    assert told.__cause__ is lost.cause
    assert "(killed by signal 9): back" in str(Resumed.of(lost, (), {}, (), 0, 0))
