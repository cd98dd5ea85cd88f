"""`Resume`: how long to try to go on after a worker was lost; `Resumed`: how it went.

Values only; `recovery` does it, for `Model` and `Context`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from caravan.errors import LocalProtocolError, RemoteError, UsageError, WorkerLost
from caravan.wire.extension import Status

_REFUSALS = (Status.BAD_REQUEST, Status.UNKNOWN_COMMAND, Status.REFUSED)
_FIRST_DELAY = 0.05
_MOST_DELAY = 2.0


@dataclass(frozen=True, slots=True)
class Resumed:
    """A loss that was got over.

    Attributes:
        lost: the loss.
        also: names of devices of other workers that were lost at the same time, or with it: what
            was to be copied to them never came.
        gone: names of devices that did not come back, with the reason; the model is on the others.
        devices: names of the devices that it is on now.
        seconds: from the loss until everything was as before.
        n_tokens: that were read again.
    """

    lost: WorkerLost
    also: tuple[str, ...]
    gone: dict[str, str]
    devices: tuple[str, ...]
    seconds: float
    n_tokens: int

    @classmethod
    def of(
        cls,
        lost: WorkerLost,
        names: tuple[str, ...],
        gone: dict[str, str],
        devices: tuple[str, ...],
        seconds: float,
        n_tokens: int,
    ) -> Resumed:
        """`names`: of all devices that were lost."""
        # devices that share a connection are named together
        own = lost.device.split(",")
        also = tuple(name for name in names if name not in own)
        return cls(lost, also, gone, devices, seconds, n_tokens)

    def __str__(self) -> str:
        lost = self.lost
        text = f"{lost.device} at {lost.endpoint} was lost during {lost.command} ({lost.cause})"
        if self.also:
            text += f", and with it {', '.join(self.also)}"
        if self.gone:
            reasons = "; ".join(dict.fromkeys(self.gone.values()))
            text += f": {', '.join(self.gone)} did not come back ({reasons}), on"
            text += f" {', '.join(self.devices)} after {self.seconds:.1f} s"
        else:
            text += f": back after {self.seconds:.1f} s"
        if self.n_tokens:
            text += f", {self.n_tokens} token{'s' * (self.n_tokens != 1)} replayed"
        return text


@dataclass(frozen=True, slots=True)
class Resume:
    """How to go on after a loss. Raises UsageError for numbers that cannot be meant.

    Attributes:
        wait: seconds that a worker has to come back; then it is done without, if the memory of the
            others allows that.
        most: losses in a row, with nothing computed between them, that are got over.
        on_resume: told of each loss that was got over.
        on_wait: told when a worker is not back at once: of the loss, and of the seconds that it is
            waited for.
    """

    wait: float = 60.0
    most: int = 5
    on_resume: Callable[[Resumed], None] | None = None
    on_wait: Callable[[WorkerLost, float], None] | None = None

    def __post_init__(self) -> None:
        # written so that "not a number" fails too
        if not 0 <= self.wait < math.inf:
            raise UsageError(f"wait {self.wait} is not a number of seconds")
        if self.most < 1:
            raise UsageError(f"most {self.most} is not a number of losses from 1 up")

    def tell(self, resumed: Resumed) -> None:
        if self.on_resume is not None:
            self.on_resume(resumed)


def policy(resume: bool | Resume | None) -> Resume | None:
    """The words that a caller may use for it: True is the default, False none. Raises UsageError
    for another one."""
    if isinstance(resume, Resume):
        return resume
    if resume not in (True, False, None):
        raise UsageError(f"resume {resume!r} is neither True nor False, nor a Resume")
    return Resume() if resume else None


def is_refusal(lost: WorkerLost) -> bool:
    """Whether a worker would not do what it was asked to, or this head could not ask: then it would
    be the same again."""
    cause = lost.cause
    if isinstance(cause, RemoteError):
        return cause.code in _REFUSALS
    return isinstance(cause, LocalProtocolError)


def delays() -> Iterator[float]:
    """Seconds before each next attempt: short at first, since most workers are there at once."""
    delay = _FIRST_DELAY
    while True:
        yield delay
        delay = min(2 * delay, _MOST_DELAY)


class Losses:
    """Counts losses in a row."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, lost: WorkerLost, resume: Resume) -> None:
        """One more; raises it when there were too many."""
        self.count += 1
        if self.count > resume.most:
            raise lost.but(f"that was the loss number {self.count} in a row") from lost
