"""`Splitter`: who decides which device gets how many layers, where nobody has said it.

`plan.auto` is one, on a floor above; without one it goes by free memory (`planning`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from caravan.llm.devices import EngineDevice
from caravan.llm.params import ContextParams, ModelParams


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A model that is to be split.

    Attributes:
        path: its file, or the first of several.
        devices: in the order of the layers.
        context: what it is planned for; its n_ctx is never 0.
        layers: bytes of weights and KV cache of each layer that goes to a device, the output
            layer last.
        room: bytes that each device has for layers; what it computes with is taken off.
        split: whole layers of each device, as they are without anybody's advice.
    """

    path: Path
    params: ModelParams
    devices: tuple[EngineDevice, ...]
    context: ContextParams
    layers: Sequence[int]
    room: Sequence[int]
    split: Sequence[float]


class Splitter(Protocol):
    """See the module."""

    def split(self, request: SplitRequest) -> list[float] | None:
        """Whole layers for each device, none above its room; 0 leaves one out. None: no advice.

        Raises WorkerLost for a device that is lost meanwhile, and KeyboardInterrupt.
        """

    def settled(self, taken: bool) -> None:
        """After answers that were not None: whether the last one is what the model is loaded with.
        If not, none has fitted with room to spare, and it goes by memory."""
