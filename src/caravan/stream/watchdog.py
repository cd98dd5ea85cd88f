"""`Watchdog`: one thread that asks every stream of a cluster, about once a second, how it is.

It bounds every wait of the head: a ticket of a silent peer fails within the stream's timeout.
"""

from __future__ import annotations

import threading
import time

from caravan.errors import CaravanError
from caravan.stream.dispatcher import Stream


class Watchdog:
    """Watches `streams` until closed."""

    def __init__(self, timeout: float) -> None:
        self._streams: list[Stream] = []
        self._interval = max(0.02, min(1.0, timeout / 10))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="caravan-watchdog", daemon=True)
        self._thread.start()

    def watch(self, stream: Stream) -> None:
        """Add a stream."""
        self._streams.append(stream)

    def _run(self) -> None:
        while not self._stop.wait(self._step()):
            now = time.monotonic()
            for stream in list(self._streams):
                if stream.ended:
                    self._streams.remove(stream)
                else:
                    self._look_at(stream, now)

    def _step(self) -> float:
        """Seconds to the next look: also one that a peer will soon not wait for any longer."""
        allowances = [stream.allowance / 10 for stream in list(self._streams) if stream.allowance]
        return max(0.02, min([self._interval, *allowances]))

    def _look_at(self, stream: Stream, now: float) -> None:
        try:
            stream.tick(now)
        except Exception as exc:
            # a defect here must cost one stream, not the bound of every other one's waits
            stream.fail(CaravanError(f"internal error: {exc!r}"), "watchdog")

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._stop.set()
        self._thread.join(5.0)
