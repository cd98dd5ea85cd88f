"""Everything that can go wrong with a worker, in every phase of a head's life: what comes of it.

Each cell is one head over two workers; what happens, happens to the first one, which the head
reaches through a cable. Another head computes on both workers all the time. Afterwards the
workers serve a new head with the engine's own results, and nothing is left.

CARAVAN_FAULT_SECONDS=60 freezes for so long, with a timeout of half of that, instead of a second.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import (
    CaravanError,
    ConnectError,
    ContextError,
    LinkDamaged,
    ModelError,
    SessionEnded,
    TransportTimeout,
    WorkerLost,
)
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.transport.certificates import Tls
from caravan.wire.commands import Base, Ext
from e2e import tiny
from e2e.cable import Cable
from e2e.loads import is_spare
from e2e.processes import BOUND, children, descriptors, kill, wait_for
from tls_ends import certificates
from wired import Side
from worker.raw_client import BaseClient, ExtClient

PARAMS = ContextParams(n_ctx=128, n_ubatch=8, n_batch=128, n_threads=1)
PROMPT, STEPS = list(range(5, 69)), list(range(80, 86))
MB = 1 << 20
FROZEN = float(os.environ.get("CARAVAN_FAULT_SECONDS", "0"))
TIMEOUT = FROZEN / 2 or 1.0
HELLO = 33
LEFT = 64 << 10
HALVES = ModelParams(tensor_split=(1, 1), repack=False)
PHASES = ("connect", "load", "prompt", "decode", "idle")
SILENT = ("worker frozen", "cable pulled")


# what may come of it


@dataclass(frozen=True)
class Fails:
    """An error of this kind, whose text has `text`, and the causes that a loss may have."""

    error: type[CaravanError]
    text: str
    cause: type[BaseException] | tuple[type[BaseException], ...] = BaseException


LOST_SILENT = Fails(WorkerLost, f"no sign of life for {TIMEOUT:g} s", TransportTimeout)
LOST_GONE = Fails(WorkerLost, "clos|reset|pipe")
LOST_KILLED = Fails(WorkerLost, "the session process was killed by signal SIGKILL", SessionEnded)
LOST_CUT = Fails(WorkerLost, "since a connection to its head broke", SessionEnded)
# the worker's end of TLS notices first; its alert says so, if it arrives, else its supervisor does
LOST_CHANGED = Fails(WorkerLost, "the link damaged what it carried", (LinkDamaged, SessionEnded))
NO_ROOM = r"RPC0 at .*no room for a buffer of .*--max-memory"
NO_CONNECTION = Fails(ConnectError, "closed the connection")
NO_HANDSHAKE = Fails(ConnectError, "")
NO_ANSWER = Fails(ConnectError, "did not (answer|open a session)|not in time")
NO_MODEL, NO_CONTEXT = Fails(ModelError, NO_ROOM), Fails(ContextError, NO_ROOM)
GOES_ON = None

OUTCOMES: dict[str, tuple[Fails | None, ...]] = {
    "worker killed": (NO_CONNECTION, LOST_GONE, LOST_GONE, LOST_GONE, LOST_GONE),
    "session killed": (GOES_ON, LOST_KILLED, LOST_KILLED, LOST_KILLED, LOST_KILLED),
    "worker frozen": (NO_ANSWER, LOST_SILENT, LOST_SILENT, LOST_SILENT, LOST_SILENT),
    "cable cut": (NO_CONNECTION, LOST_CUT, LOST_CUT, LOST_CUT, LOST_CUT),
    "cable pulled": (NO_ANSWER, LOST_SILENT, LOST_SILENT, LOST_SILENT, LOST_SILENT),
    "byte changed": (NO_HANDSHAKE, LOST_CHANGED, LOST_CHANGED, LOST_CHANGED, LOST_CHANGED),
    "disk full": (GOES_ON, GOES_ON, GOES_ON, GOES_ON, GOES_ON),
    # what connects may still find that there is no room
    "no memory": (NO_MODEL, NO_MODEL, NO_CONTEXT, GOES_ON, GOES_ON),
}
CELLS = [
    pytest.param(fault, phase, outcome, id=f"{fault}, {phase}".replace(" ", "_"))
    for fault, outcomes in OUTCOMES.items()
    for phase, outcome in zip(PHASES, outcomes, strict=True)
]


# what stays for all cells


@dataclass(frozen=True)
class Expected:
    """The tiny model's file, and the engine's own logits after the prompt and after the steps."""

    path: Path
    prompt: np.ndarray
    steps: np.ndarray


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    path = tiny.write(tmp_path_factory.mktemp("tiny") / "tiny.gguf")
    with (
        Model(path, ModelParams(repack=False)) as model,
        Context(model, PARAMS) as context,
    ):
        context.decode(PROMPT)
        prompt = context.logits()
        for token in STEPS:
            context.decode_one(token)
        return Expected(path, prompt, context.logits())


class Bystander:
    """A head that computes on the same workers all the time."""

    def __init__(self, endpoints: list[str], sample: Expected) -> None:
        self.rounds = 0
        self._stop = threading.Event()
        self._ready = threading.Event()
        self._side = Side(lambda: self._run(endpoints, sample))
        assert self._ready.wait(BOUND)

    def _run(self, endpoints: list[str], sample: Expected) -> None:
        try:
            with (
                caravan.connect(endpoints) as cluster,
                Model(sample.path, HALVES, devices=cluster.devices) as model,
                Context(model, PARAMS) as context,
            ):
                while not self._stop.wait(0.05):
                    context.clear()
                    context.decode(PROMPT)
                    assert np.array_equal(context.logits(), sample.prompt)
                    self.rounds += 1
                    self._ready.set()
        finally:
            self._ready.set()

    def check(self) -> None:
        """It goes on, and nothing has happened to it."""
        rounds = self.rounds
        wait_for(lambda: self.rounds > rounds + 1 or not self._side.running)
        assert self._side.running, self._side.error

    def close(self) -> None:
        self._stop.set()
        self._side.join()


@contextmanager
def no_room_on_disk() -> Iterator[None]:
    """Programs that are started inside can write no file of more than some bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@dataclass
class Lab:
    """Two workers with a bystander on them. The first has a cache, for which there is no disk."""

    workers: list[caravan.Worker]
    bystander: Bystander
    theirs: set[int] = field(default_factory=set)
    fds: list[int] = field(default_factory=list)

    def sessions(self, worker: caravan.Worker) -> list[int]:
        """The processes that serve a head, other than the bystander."""
        return [p for p in children(worker.pid) if p not in self.theirs and not is_spare(p)]

    def extra_fds(self) -> list[int]:
        """What the supervisors have open, beside one for each session process."""
        return [descriptors(w.pid) - len(children(w.pid)) for w in self.workers]

    def settle(self) -> None:
        """Wait until nothing of an earlier head is left, and the next one need not wait."""
        wait_for(lambda: not any(map(self.sessions, self.workers)))
        wait_for(lambda: self.extra_fds() == self.fds)
        for worker in self.workers:
            # whoever only asks something leaves the process to the next one
            with BaseClient(worker.endpoint) as client:
                client.call(Base.DEVICE_COUNT)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory, sample: Expected) -> Iterator[Lab]:
    cache = ("--cache", str(tmp_path_factory.mktemp("full")), "--max-memory", "16MiB")
    with no_room_on_disk():
        first = caravan.Worker("CPU:1", options=cache)
    with first, caravan.Worker("CPU:1") as second:
        workers = [first, second]
        bystander = Bystander([worker.endpoint for worker in workers], sample)
        made = Lab(workers, bystander)
        try:
            for worker in workers:
                wait_for(lambda w=worker: len(made.sessions(w)) == 1)
                made.theirs.update(made.sessions(worker))
            made.fds = made.extra_fds()
            yield made
        finally:
            bystander.close()


# one head


@dataclass
class Head:
    """What a cell needs: the two workers, and the cable to the first one.

    Attributes:
        before: what is to happen in a phase happens before its buffers are made.
    """

    lab: Lab
    victim: caravan.Worker
    cable: Cable
    sample: Expected
    stack: ExitStack
    timeout: float = 30.0
    before: bool = False
    tls: Tls | None = None
    phase: str = ""

    def session(self) -> int:
        """The process that serves this head; before there is one, the one that will."""
        found = self.lab.sessions(self.victim) or list(filter(is_spare, children(self.victim.pid)))
        return found[0]

    def run(self, phase: str, act: Callable[[], None], lost: bool) -> None:
        """A head's whole life; `act` comes in the middle of the phase. Raises what it meets."""
        self.phase = phase
        with ExitStack() as stack:
            cluster = self.connect(stack, act if phase == "connect" else None)
            model = self.load(stack, cluster, act if phase == "load" else None)
            if phase == "prompt" and self.before:
                act()
            context = stack.enter_context(Context(model, PARAMS))
            if phase == "prompt" and not self.before:
                self.at_graph(cluster, 3, act)
            self.prompt(context)
            if phase == "decode":
                self.at_graph(cluster, 2, act)
            for token in STEPS:
                context.decode_one(token)
            assert np.array_equal(context.logits(), self.sample.steps)
            if phase == "idle":
                act()
                if lost:
                    # it is noticed though nothing is asked of the worker
                    wait_for(lambda: cluster.devices[0].link.stream.lost, BOUND + FROZEN)
            context.clear()
            self.prompt(context)

    def connect(self, stack: ExitStack, act: Callable[[], None] | None) -> caravan.Cluster:
        endpoints, options = [self.cable.endpoint, self.lab.workers[1].endpoint], {}
        if self.tls is not None:
            # whom it is given for all of its workers
            endpoints, options = endpoints[:1], {"tls": self.tls}
        if act is not None:
            self.cable.hold_after(HELLO)
            side = Side(lambda: self.cable.held.wait(BOUND) and act())
            stack.callback(side.join)
        return stack.enter_context(caravan.connect(endpoints, timeout=self.timeout, **options))

    def load(
        self, stack: ExitStack, cluster: caravan.Cluster, act: Callable[[], None] | None
    ) -> Model:
        acts = [act] if act is not None else []
        if acts and self.before:
            acts.pop()()
        elif acts:
            self.cable.hold_after(MB // 2)

        def progress(fraction: float) -> bool:
            if acts and self.cable.held.is_set():
                acts.pop()()
            return True

        path, devices = self.sample.path, cluster.devices
        params = replace(HALVES, tensor_split=(1,) * len(devices))
        model = Model(path, params, devices=devices, progress=progress, fit=False)
        return stack.enter_context(model)

    def prompt(self, context: Context) -> None:
        context.decode(PROMPT)
        assert np.array_equal(context.logits(), self.sample.prompt)

    def at_graph(self, cluster: caravan.Cluster, number: int, act: Callable[[], None]) -> None:
        """Do `act` when the first device has been sent its graph of that number."""
        link = cluster.devices[0].link
        own, seen = link.graph_compute, []

        def graph_compute(graph: object) -> None:
            own(graph)
            seen.append(graph)
            if len(seen) == number:
                act()

        link.graph_compute = graph_compute


# what happens


def kill_worker(head: Head) -> None:
    kill(head.victim.pid)
    head.cable.plug()


def kill_session(head: Head) -> None:
    pid = head.session()
    kill(pid)
    # its worker has noticed
    wait_for(lambda: pid not in children(head.victim.pid))
    head.cable.plug()


def freeze_worker(head: Head) -> None:
    """The bystander's session goes on: it is a machine of its own to its head."""
    frozen = [head.session()]
    if head.phase == "connect":
        frozen.append(head.victim.pid)
    for pid in frozen:
        kill(pid, signal.SIGSTOP)
        head.stack.callback(kill, pid, signal.SIGCONT)
    head.cable.plug()


def change_byte(head: Head) -> None:
    """Within TLS: the piece that waits, or the head's first one of the handshake."""
    head.cable.damage(1 if head.phase == "connect" else 0)
    head.cable.plug()


def take_memory(head: Head) -> None:
    """Another head takes nearly all that there is."""
    hog = head.stack.enter_context(ExtClient(head.victim.endpoint))
    assert hog.session is not None
    free, _ = hog.call(Ext.MEMORY)
    hog.alloc(free - LEFT)
    head.cable.plug()


FAULTS: dict[str, Callable[[Head], None]] = {
    "worker killed": kill_worker,
    "session killed": kill_session,
    "worker frozen": freeze_worker,
    "cable cut": lambda head: head.cable.cut(),
    "cable pulled": lambda head: head.cable.pull(),
    "byte changed": change_byte,
    "disk full": lambda head: head.cable.plug(),
    "no memory": take_memory,
}


@contextmanager
def victim_of(fault: str, lab: Lab) -> Iterator[caravan.Worker]:
    if fault == "worker killed":
        with caravan.Worker("CPU:1") as worker:
            yield worker
    elif fault == "byte changed":
        cert = (
            "--tls-cert",
            certificates().path("worker"),
            "--tls-key",
            certificates().path("worker-key"),
        )
        with caravan.Worker("CPU:1", options=cert) as worker:
            yield worker
    else:
        yield lab.workers[0]


@pytest.mark.parametrize(("fault", "phase", "outcome"), CELLS)
def test_a_fault(fault: str, phase: str, outcome: Fails | None, lab: Lab, sample: Expected) -> None:
    lab.settle()
    with victim_of(fault, lab) as victim, ExitStack() as stack:
        cable = stack.enter_context(Cable(victim.endpoint))
        head = Head(lab, victim, cable, sample, stack, before=fault == "no memory")
        if fault in SILENT:
            head.timeout = TIMEOUT
        if fault == "byte changed":
            # while it is idle, only its signs of life pass
            head.tls, head.timeout = certificates().tls(ca=True), 6.0
        started = time.monotonic()
        side = Side(lambda: head.run(phase, lambda: FAULTS[fault](head), outcome is not None))
        wait_for(lambda: not side.running, BOUND + FROZEN)
        check(side, outcome, cable.endpoint)
        lab.bystander.check()
        if fault in SILENT:
            time.sleep(max(0.0, FROZEN - (time.monotonic() - started)))
    if phase == "idle" and fault == "disk full":
        assert any("cannot" in line for line in lab.workers[0].messages())
    lab.settle()
    if phase == PHASES[-1]:
        # after the other ones, the next cell's head is a new one, too
        serves(lab, sample)


def serves(lab: Lab, sample: Expected) -> None:
    """A new head, without a cable, has the engine's own results."""
    with (
        caravan.connect([worker.endpoint for worker in lab.workers]) as cluster,
        Model(sample.path, HALVES, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        context.decode(PROMPT)
        assert np.array_equal(context.logits(), sample.prompt)


def test_the_table_in_the_docs_is_this_one():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text(encoding="utf-8")
    part = page.partition("\n## Faults\n")[2].partition("\n## ")[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    told = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert told[0] == ["Fault", *PHASES]
    assert told[1:] == [
        [fault, *(f"`{o.error.__name__}`" if o else "goes on" for o in outcomes)]
        for fault, outcomes in OUTCOMES.items()
    ]


def check(side: Side, outcome: Fails | None, endpoint: str) -> None:
    """How the head's life has ended."""
    if outcome is GOES_ON:
        side.join()
        return
    with pytest.raises(outcome.error) as caught:
        side.join()
    error = caught.value
    assert type(error) is outcome.error
    assert endpoint in str(error)
    assert re.search(outcome.text, str(error)), error
    assert "\n" not in str(error)
    if isinstance(error, WorkerLost):
        assert (error.endpoint, error.device) == (endpoint, "RPC0")
        assert isinstance(error.cause, outcome.cause)
