"""Why the engine said no, in words: its newest error lines, cleaned up for a one-line message.

The engine's C functions answer NULL or a number; what it logged is all there is.
"""

from __future__ import annotations

import re

from caravan import engine
from caravan.errors import CaravanError
from caravan.llm.devices import EngineDevice, check_all

_WORDS = {"std::bad_alloc": "out of memory"}
# "llama_model_load: error loading model: …": the names of functions mean nothing to a user
_PREFIX = re.compile(r"^(?:\w[\w:~]*: )+?(?=error |failed |\S+ )")


def reason(default: str) -> str:
    """The first error line since `engine.forget_errors()`, which is nearest to the cause."""
    lines = [_PREFIX.sub("", line) for line in engine.recent_errors()]
    line = lines[0] if lines else default
    for jargon, words in _WORDS.items():
        line = line.replace(jargon, words)
    return line


class Refusals:
    """Remembers the devices' refused allocations, to tell a new one from an old one."""

    def __init__(self, devices: tuple[EngineDevice, ...]) -> None:
        self._devices = devices
        self._holds = [device.hold() for device in devices]
        self._before = [device.allocation_error for device in devices]
        engine.forget_errors()

    def cause(self) -> CaravanError | None:
        """An allocation that a device refused since; raises WorkerLost if a device is lost."""
        check_all(self._holds)
        for device, before in zip(self._devices, self._before, strict=True):
            if device.allocation_error is not before:
                return device.allocation_error
        return None
