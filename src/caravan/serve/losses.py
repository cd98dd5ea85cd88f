"""`LossLog`: which losses of workers were got over, and which one is waited for, for people.

Its two methods `on_wait` and `on_resume` go into a `Resume`; they are called on the threads that
compute. Read by `cluster`.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from typing import Any

from caravan.errors import WorkerLost
from caravan.llm.resume import Resumed

_KEPT = 20


class LossLog:
    """See the module; any thread.

    Attributes:
        count: losses that were got over.
    """

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        self._recent: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._waiting: tuple[str, float, float] | None = None
        self._newest: weakref.ref[WorkerLost] | None = None
        self._ended = 0.0

    def on_wait(self, lost: WorkerLost, seconds: float) -> None:
        """A worker is not back at once, and is waited for so long."""
        with self._lock:
            self._waiting = (f"{lost.device} at {lost.endpoint}", time.time(), seconds)

    def on_resume(self, resumed: Resumed) -> None:
        """A loss was got over. Each context of a model tells of it: it counts once."""
        with self._lock:
            self._waiting = None
            now = time.monotonic()
            if self._is_known(resumed, now):
                entry = self._recent[-1]
                entry["seconds"] = round(max(entry["seconds"], resumed.seconds), 2)
                entry["n_tokens"] += resumed.n_tokens
                self._ended = max(self._ended, now)
                return
            self.count += 1
            self._newest, self._ended = weakref.ref(resumed.lost), now
            self._recent.append(_entry(resumed))

    def _is_known(self, resumed: Resumed, now: float) -> bool:
        """Whether it is the newest one: another context, which noticed it meanwhile, or, having had
        nothing to do, only now."""
        if not self._recent or self._newest is None:
            return False
        return resumed.lost is self._newest() or now - resumed.seconds <= self._ended

    def facts(self) -> dict[str, Any]:
        """For JSON: `count`, the `recent` ones, the newest last, and what is `waiting`, or None."""
        with self._lock:
            waiting = None
            if self._waiting is not None:
                what, since, seconds = self._waiting
                waiting = {"device": what, "since": round(since, 1), "seconds": seconds}
            recent = [dict(entry) for entry in self._recent]
            return {"count": self.count, "waiting": waiting, "recent": recent}


def _entry(resumed: Resumed) -> dict[str, Any]:
    return {
        "time": round(time.time(), 1),
        "devices": [*resumed.lost.device.split(","), *resumed.also],
        "endpoint": resumed.lost.endpoint,
        "cause": str(resumed.lost.cause),
        "gone": dict(resumed.gone),
        "seconds": round(resumed.seconds, 2),
        "n_tokens": resumed.n_tokens,
    }
