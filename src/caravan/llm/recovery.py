"""`bring_back`: a model whose devices were lost is put on them again, or on those that are left.

Waits for workers, each on a thread of its own, and decides; `Model` frees and loads. Knows nothing
of contexts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from caravan import interrupt
from caravan.errors import (
    AllocationError,
    AuthenticationError,
    CaravanError,
    EngineError,
    TransportError,
    WorkerLost,
    WorkerStartError,
)
from caravan.llm.devices import EngineDevice
from caravan.llm.resume import Losses, Resume, delays, is_refusal

# An attempt that has begun in time is given so many seconds more: a session process may have to
# start.
_GRACE = 5.0
_TICK = 0.1
# From so many seconds on, who waits is told so.
_PATIENCE = 1.0
# What may be otherwise in a moment; all else that can be wrong with a worker stays wrong.
_NOT_YET = (TransportError, WorkerStartError, WorkerLost)


class Connection(Protocol):
    """The way to a worker, as `backend.connection` has it."""

    @property
    def lost(self) -> WorkerLost | None: ...

    def reopen(self) -> None: ...


class Target(Protocol):
    """What is to be brought back; a `Model`."""

    @property
    def devices(self) -> tuple[EngineDevice, ...]: ...

    def put_on(self, devices: Sequence[EngineDevice]) -> None:
        """Plan it for these devices alone; raises DoesNotFit."""

    def load(self) -> None:
        """Load it as it was planned; raises WorkerLost and what the engine says."""


class Back(NamedTuple):
    """How it came back.

    Attributes:
        lost: names of the devices that were lost.
        gone: names of those that it does without now, with the reason.
    """

    lost: tuple[str, ...]
    gone: dict[str, str]

    def and_then(self, later: Back) -> Back:
        """Both together."""
        return Back(tuple(dict.fromkeys(self.lost + later.lost)), self.gone | later.gone)


def bring_back(
    target: Target, lost: WorkerLost, resume: Resume, losses: Losses, stop: threading.Event
) -> Back:
    """Load what was lost once more, where it was if the workers are back in time.

    Losses on the way count, and each is waited for.

    Args:
        target: with nothing of it left on the devices.
        lost: the loss that has begun it.
        stop: ends it soon.

    Raises WorkerLost, with the outcome, when it cannot be done.
    """
    names: dict[str, None] = {}
    gone: dict[str, str] = {}
    while True:
        deadline = time.monotonic() + resume.wait
        down = _lost_connections(target.devices)
        names |= {d.name: None for d in target.devices if connection_of(d) in down}
        missing = await_return(
            list(down), resume.wait, stop, on_wait=lambda: _tell_wait(resume, lost)
        )
        if stop.is_set():
            raise lost.but("closed while it was waited for")
        try:
            if missing:
                gone |= _do_without(target, lost, missing)
            _load(target, lost, deadline, stop)
            return Back(tuple(names), gone)
        except WorkerLost as again:
            if again.outcome or is_refusal(again):
                raise
            losses.add(again, resume)


def _tell_wait(resume: Resume, lost: WorkerLost) -> None:
    if resume.on_wait is not None:
        resume.on_wait(lost, resume.wait)


def connection_of(device: EngineDevice) -> Connection | None:
    """The way to a worker's device; None for one of this process's own engine."""
    found: Connection | None = getattr(device, "connection", None)
    return found


def _lost_connections(devices: Sequence[EngineDevice]) -> dict[Connection, None]:
    ways = (connection_of(device) for device in devices)
    return {way: None for way in ways if way is not None and way.lost is not None}


def _do_without(
    target: Target, lost: WorkerLost, missing: dict[Connection, CaravanError | None]
) -> dict[str, str]:
    """Plan for the devices that are left; names and reasons of the others."""
    left = [device for device in target.devices if connection_of(device) not in missing]
    gone = {}
    for device in target.devices:
        way = connection_of(device)
        if way in missing:
            gone[device.name] = str(missing[way] or "no answer")
    reasons = "; ".join(dict.fromkeys(gone.values()))
    if not left:
        raise lost.but(f"it did not come back: {reasons}")
    try:
        target.put_on(left)
    except EngineError as exc:
        raise lost.but(f"it did not come back ({reasons}), and without it {exc}") from exc
    return gone


def _load(target: Target, lost: WorkerLost, deadline: float, stop: threading.Event) -> None:
    """What a dying session still holds may be missing for a moment."""
    for delay in delays():
        try:
            return target.load()
        except EngineError as exc:
            late = time.monotonic() + delay > deadline or stop.is_set()
            if late or not lacks_memory(exc):
                raise lost.but(f"loading it again failed: {exc}") from exc
        stop.wait(delay)


def lacks_memory(error: CaravanError) -> bool:
    """Whether a device has refused an allocation."""
    return isinstance(error.__cause__, AllocationError)


def await_return(
    connections: Sequence[Connection],
    wait: float,
    stop: threading.Event,
    *,
    on_wait: Callable[[], None] = lambda: None,
) -> dict[Connection, CaravanError | None]:
    """Have lost connections opened again; those that are not after `wait` seconds, with the last
    reason.

    All at once; each again and again, and at least once. Ctrl-C and `stop` end it.
    """
    began = time.monotonic()
    over = threading.Event()
    news = threading.Event()
    returns = [Return(connection, began + wait, over, news) for connection in connections]
    told = False
    try:
        for one in returns:
            one.start()
        while any(one.going_on for one in returns) and not stop.is_set():
            seconds = time.monotonic() - began
            if seconds > wait + _GRACE or interrupt.pending():
                break
            if seconds > _PATIENCE and not told:
                told = True
                on_wait()
            news.wait(_TICK)
            news.clear()
    finally:
        over.set()
    return {one.connection: one.error for one in returns if not one.back}


class Return:
    """One worker's way back, on a thread that nobody has to wait for.

    Args:
        connection: to be opened again.
        deadline: of time.monotonic, for the start of the last attempt.
        over: set when nobody waits any more.
        news: set at the end.

    Attributes:
        back: whether it is open again.
        error: why the last attempt failed.
    """

    def __init__(
        self,
        connection: Connection,
        deadline: float,
        over: threading.Event,
        news: threading.Event,
    ) -> None:
        self.connection = connection
        self.back = False
        self.error: CaravanError | None = None
        self._deadline = deadline
        self._over = over
        self._news = news
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="caravan-reconnect", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def going_on(self) -> bool:
        return not self._ended

    def _run(self) -> None:
        try:
            self.attempt_all()
        finally:
            self._ended = True
            self._news.set()

    def attempt_all(self) -> None:
        """Until it is back, or will not be."""
        for delay in delays():
            try:
                self.connection.reopen()
            except AuthenticationError as exc:
                # a worker would be asked ever more slowly, and take it for an attack
                self.error = exc
                return
            except _NOT_YET as exc:
                self.error = exc
            except Exception as exc:
                self.error = exc if isinstance(exc, CaravanError) else CaravanError(repr(exc))
                return
            else:
                self.back = True
                return
            left = self._deadline - time.monotonic()
            # the last attempt is made when the time is over
            if left <= 0 or self._over.wait(min(delay, left)):
                return
