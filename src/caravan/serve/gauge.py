"""`Gauge`: one device as the page shows it: what it is, its memory, and how busy it was, a second
at a time.

A worker is asked without waiting for it: at most one question of a kind is on its way, and what is
not answered in time is missing for that second. Stepped by `cluster`, on its thread alone.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

from caravan.backend import RemoteDevice
from caravan.errors import CaravanError, RemoteError
from caravan.llm.devices import EngineDevice
from caravan.serve.rates import SECONDS, rounded, series
from caravan.stream.link import DeviceLink
from caravan.stream.telemetry import DeviceStats, MemoryQuestion, StatsQuestion

# An idle worker is asked for its memory as often; else only after this end has changed it.
_MEMORY_SECONDS = 10.0


class Gauge:
    """A device of this process's own engine, of which only the memory is known.

    Attributes:
        name: of the device.
        busy: share of each of the last seconds that it spent computing; None: not known.
    """

    def __init__(self, device: EngineDevice) -> None:
        self.name = device.name
        self.busy = series()
        self._device = device

    def ask(self, idle: bool) -> None:
        """Begin a second; `idle`: nothing is being computed."""

    def collect(self, busy: float | None = None) -> None:
        """End it. `busy`: what is known of it from elsewhere."""
        self.busy.append(busy)

    @property
    def lost(self) -> str:
        """Why it is, or empty."""
        return ""

    def facts(self, planned: dict[str, int] | None = None) -> dict[str, Any]:
        """For JSON. `planned`: what is known of its memory by use."""
        free, total = self._device.memory()
        return {
            "name": self.name,
            "endpoint": None,
            "description": self._device.description,
            "engine": None,
            "cause": "",
            "memory": {"free": free, "total": total, "used": planned or {}},
            "link": None,
            "busy": rounded(self.busy),
        }


class WorkerGauge(Gauge):
    """A device of a worker."""

    def __init__(self, device: RemoteDevice) -> None:
        super().__init__(device)
        self._remote = device
        self._begin(device.link)

    def _begin(self, link: DeviceLink) -> None:
        """The device is there by a new link: totals begin again."""
        self._link = link
        self._asked: StatsQuestion | None = None
        self._asked_memory: MemoryQuestion | None = None
        self._counts = link.extension
        self._last: DeviceStats | None = None
        self._flow = (0.0, 0.0)
        self._memory = (link.info.memory_free, link.info.memory_total)
        self._memory_at = -_MEMORY_SECONDS
        self._allocated_then = -1
        self._trips: deque[float] = deque(maxlen=SECONDS)

    def ask(self, idle: bool) -> None:
        link = self._remote.link
        if link is not self._link:
            self._begin(link)
        if not link.extension or link.stream.ended or link.stream.crowded:
            return
        if self._counts and self._asked is None:
            self._asked = StatsQuestion(link.stream)
        if self._asked_memory is None and self._memory_is_old(idle):
            self._asked_memory = MemoryQuestion(link.stream)

    def _memory_is_old(self, idle: bool) -> bool:
        allocated = sum(self._remote.allocated().values())
        late = idle and time.monotonic() - self._memory_at > _MEMORY_SECONDS
        if not late and allocated == self._allocated_then:
            return False
        self._allocated_then, self._memory_at = allocated, time.monotonic()
        return True

    def collect(self, busy: float | None = None) -> None:
        self._collect_memory()
        asked = self._asked
        if asked is None or not asked.done or self._remote.link is not self._link:
            self._missing()
            return
        self._asked = None
        try:
            stats = asked.stats()
        except RemoteError:
            # a worker of an older version
            self._counts = False
            self._missing()
        except CaravanError:
            self._last = None
            self._missing()
        else:
            self._trips.append(asked.answered - asked.at)
            self.busy.append(self._share(stats))
            self._last = stats

    def _missing(self) -> None:
        self.busy.append(None)
        self._flow = (0.0, 0.0)

    def _share(self, now: DeviceStats) -> float | None:
        """Of the time since the last answer, by the worker's own clock."""
        last = self._last
        if last is None or now.now <= last.now:
            return None
        spent = now.now - last.now
        seconds = spent / 1e9
        self._flow = (
            max(0, now.bytes_in - last.bytes_in) / seconds,
            max(0, now.bytes_out - last.bytes_out) / seconds,
        )
        return min(1.0, max(0.0, (now.computing - last.computing) / spent))

    def _collect_memory(self) -> None:
        asked = self._asked_memory
        if asked is None or not asked.done:
            return
        self._asked_memory = None
        try:
            self._memory = asked.memory()
        except CaravanError:
            # it is lost, or says nothing: what was known stays
            return

    @property
    def lost(self) -> str:
        failure = self._remote.link.stream.failure
        return "" if failure is None else str(failure.cause)

    def facts(self, planned: dict[str, int] | None = None) -> dict[str, Any]:
        device, lost = self._remote, self.lost
        used = device.allocated()
        free, total = self._memory
        if not self._link.extension:
            # such a server answers no questions while it computes
            free = max(0, self._link.info.memory_free - sum(used.values()))
        return {
            "name": self.name,
            "endpoint": device.endpoint,
            "description": device.description,
            "engine": device.engine or None,
            "cause": lost,
            "memory": {"free": free, "total": total, "used": used},
            "link": None if lost else self._link_facts(),
            "busy": rounded(self.busy),
        }

    def _link_facts(self) -> dict[str, Any] | None:
        if not self._counts:
            return None
        # who reads an answer may be late, so that the quickest is the link's own
        into, out = self._flow
        return {
            "round_trip": round(min(self._trips), 6) if self._trips else None,
            "bytes_in": round(into),
            "bytes_out": round(out),
        }
