"""`Sink`: who brings the weights of a model that is being loaded, in place of the engine.

A load happens on one thread, and so is known by it: other loads may go to the same devices.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from caravan.backend.tensor import RemoteTensor

if TYPE_CHECKING:
    from caravan.backend.device import RemoteDevice


class Sink(Protocol):
    """Called by the slots of devices and buffers, on the loading thread; must not wait."""

    def opened(self) -> None:
        """The engine has opened the model's files and read what comes before their data.

        Called several times, always before it maps them.
        """

    def take(self, device: RemoteDevice, tensor: RemoteTensor, offset: int, size: int) -> bool:
        """Bring this part of a weight to the device; False leaves it to the engine's own write."""


@contextmanager
def bringing(sink: Sink, devices: Sequence[RemoteDevice]) -> Iterator[None]:
    """Inside, weights that the engine loads onto the devices, on this thread, go to `sink`."""
    thread = threading.get_ident()
    try:
        for device in devices:
            device.sinks[thread] = sink
        yield
    finally:
        for device in devices:
            device.sinks.pop(thread, None)


def current(device: RemoteDevice) -> Sink | None:
    """The sink of a load on this thread."""
    return device.sinks.get(threading.get_ident()) if device.sinks else None
