"""`Loading`: a model's weights on their way to the devices while, and after, the engine loads it.

The engine says which weight belongs where; nothing of it waits for bytes. Each device has its
delivery, all of them work at once, and one thread reads the digests that are not known yet, so that
workers can be asked for what they have. `wait` returns when all weights have arrived.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from caravan.backend import RemoteDevice
from caravan.backend.tensor import RemoteTensor
from caravan.errors import WorkerLost
from caravan.llm.weights import WeightFiles
from caravan.stream.delivery import Delivery, Weight

# The reading of digests is ahead of the sending by so many bytes of each device, give or take a
# tensor: what both read comes from the disk once, if it stays in memory for so long.
_AHEAD = 512 << 20
# Seconds between two looks at how far it is.
TICK = 0.1


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """How far the loading of one device is.

    Attributes:
        name, endpoint: of the device.
        total: bytes of weights that belong there.
        disk, cache, network: bytes that have got there from files of the worker's own, from its
            cache, and from here.
    """

    name: str
    endpoint: str
    total: int
    disk: int
    cache: int
    network: int

    @property
    def done(self) -> int:
        return self.disk + self.cache + self.network


class Loading:
    """See the module; the sink of one load (`backend.weights.Sink`).

    Args:
        files: of the model.
        devices: that weights may go to.
        opened: called when the engine has read the files' headers.
    """

    def __init__(
        self,
        files: WeightFiles,
        devices: Sequence[RemoteDevice],
        opened: Callable[[], None] = lambda: None,
    ) -> None:
        self._files = files
        self.opened = opened
        # for who waits, and for the thread that reads digests
        self._news = threading.Event()
        self._room = threading.Event()
        self._deliveries = {d: Delivery(d.link, self._read, self._changed) for d in devices}
        self._unknown: dict[RemoteDevice, deque[Weight]] = {d: deque() for d in devices}
        self._read_for = dict.fromkeys(devices, 0)
        self._taken: set[str] = set()
        self._cancelled = False
        self._sealed = False
        self._here = 0  # bytes that stay on this machine
        self._fraction = 0.0
        self._error: BaseException | None = None
        self._reader = threading.Thread(
            target=self._read_digests, name="caravan-digests", daemon=True
        )

    def __repr__(self) -> str:
        return f"<Loading {self._files!r}: {self.fraction:.0%}>"

    @property
    def fraction(self) -> float:
        """Of the model's bytes, never less than before; what stays on this machine counts once the
        engine has loaded."""
        brought = [delivery.brought for delivery in self._deliveries.values()]
        done = self._here + sum(b.done for b in brought)
        total = self._here + sum(b.total for b in brought)
        if not self._sealed:
            total = max(total, self._files.size)
        # some tensors go to several places, which is not known from the start
        self._fraction = max(self._fraction, done / total if total else 1.0)
        return self._fraction

    def state(self) -> list[DeviceLoad]:
        """How far each device is, in the order of the devices."""
        return [
            DeviceLoad(
                device.name,
                device.endpoint,
                delivery.brought.total,
                delivery.brought.disk,
                delivery.brought.cache,
                delivery.brought.network,
            )
            for device, delivery in self._deliveries.items()
        ]

    def take(self, device: RemoteDevice, tensor: RemoteTensor, offset: int, size: int) -> bool:
        """See `Sink`. A part of a tensor is left to the engine."""
        name = tensor.name()
        place = self._files.find(name)
        if place is None or offset or size != place.span.size or not size:
            return False
        delivery = self._deliveries[device]
        target = tensor.kept(device.link.extension)
        weight = Weight(name, target, size, place.file, place.span.offset)
        self._taken.add(name)
        delivery.expect(weight)
        if not delivery.asks:
            delivery.send(weight)
        elif (digest := self._files.digest(name)) is not None:
            delivery.ask(weight, digest)
        else:
            self._unknown[device].append(weight)
            if self._reader.ident is None:
                self._reader.start()
        return True

    def left_here(self) -> list[str]:
        """Names of the tensors that no delivery brings anywhere."""
        return [name for name in self._files.names() if name not in self._taken]

    def wait(self, step: Callable[[], bool]) -> bool:
        """The engine has said all; wait until everything has arrived. False if it was stopped.

        `step` is called some ten times a second and stops the loading by answering False. Raises
        what went wrong: ModelError for the files, WorkerLost.
        """
        places = map(self._files.find, self.left_here())
        self._here = sum(place.span.size for place in places if place is not None)
        self._sealed = True
        if self._reader.ident is None:
            self._seal()
        due = 0.0
        while True:
            self._news.clear()
            done = all(delivery.done for delivery in self._deliveries.values())
            self._raise()
            # there is news with every piece
            if done or time.monotonic() >= due:
                if not step():
                    return False
                due = time.monotonic() + TICK
            if done:
                break
            self._news.wait(TICK)
        self._files.check_unchanged()
        return True

    def cancel(self) -> None:
        """Bring nothing more from here on: the memory of the weights may be freed."""
        self._cancelled = True
        for delivery in self._deliveries.values():
            delivery.cancel()

    def close(self) -> None:
        """Stop what is still going on, and keep the digests that were read."""
        self.cancel()
        if self._reader.ident is not None:
            self._reader.join()
        self._files.save()
        # one that waits for a slow socket still has its piece, and may look at a file once more
        busy = [delivery for delivery in self._deliveries.values() if not delivery.done]
        if busy:
            threading.Thread(target=self._close_files, args=(busy,), daemon=True).start()
        else:
            self._files.close()

    def _close_files(self, busy: list[Delivery]) -> None:
        for delivery in busy:
            delivery.join()
        self._files.close()

    def _changed(self) -> None:
        self._news.set()
        self._room.set()

    def _raise(self) -> None:
        errors = [self._error, *(delivery.error for delivery in self._deliveries.values())]
        for error in errors:
            if isinstance(error, WorkerLost):
                # the worker is being asked what happened
                error.settle()
            if error is not None:
                raise error

    def _read(self, weight: Weight, offset: int, target: memoryview) -> None:
        self._files.read_into(weight.file, weight.offset + offset, target)

    # the thread that reads digests

    def _read_digests(self) -> None:
        try:
            while not self._cancelled:
                device = self._next()
                if device is not None:
                    self._find_digest(device, self._unknown[device].popleft())
                elif self._sealed and not any(self._unknown.values()):
                    self._seal()
                    return
                else:
                    self._room.wait(TICK)
                    self._room.clear()
        except BaseException as exc:
            self._error = exc
            self._news.set()

    def _next(self) -> RemoteDevice | None:
        """Whose weights to read next: those of the device that will first have nothing to send."""
        waiting = [device for device, weights in self._unknown.items() if weights]
        if not waiting:
            return None
        device = min(waiting, key=lambda d: (self._deliveries[d].backlog, self._read_for[d]))
        return device if self._deliveries[device].backlog <= _AHEAD else None

    def _find_digest(self, device: RemoteDevice, weight: Weight) -> None:
        # several tensors of the engine may be one of the file
        digest = self._files.digest(weight.name)
        if digest is None:
            digest = self._files.read_digest(weight.name, lambda: self._cancelled)
        self._read_for[device] += weight.size
        if digest is not None:
            self._deliveries[device].ask(weight, digest)

    def _seal(self) -> None:
        for delivery in self._deliveries.values():
            delivery.seal()
