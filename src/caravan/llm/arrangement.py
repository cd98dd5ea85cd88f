"""`Arrangement`: a split of a model's layers, what it takes, and the arithmetic of other splits.

Numbers of what was measured in, numbers of what may be expected out. Called by `planning` and
`advice`; knows no engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from caravan.llm.dryrun import Part
from caravan.llm.needs import Needs
from caravan.llm.placement import CPU, place_layers

# what the default split leaves free, where it can: what a worker says of its memory is an estimate
MARGIN = 0.02


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A split and what it takes.

    Attributes:
        split: the devices' shares, as the engine gets them.
        needs: what each device needs.
        layers: bytes of each layer that is on a device, the output layer last.
        parts: what the devices would hold.
    """

    split: list[float]
    needs: Needs
    layers: list[int]
    parts: list[Part]

    @property
    def roomy(self) -> bool:
        """Whether it fits with something to spare."""
        return all(
            not device.total or device.need <= device.free * (1 - MARGIN)
            for device in self.needs.devices
        )


def between(one: Arrangement, other: Arrangement, part: float) -> Arrangement:
    """What lies between two contexts of the same model and split: `one` for 0, `other` for 1."""

    def mixed(a: int, b: int) -> int:
        return int(a + (b - a) * part)

    layers = [mixed(a, b) for a, b in zip(one.layers, other.layers, strict=True)]
    parts = [
        replace(a, kv=mixed(a.kv, b.kv), compute=mixed(a.compute, b.compute))
        for a, b in zip(one.parts, other.parts, strict=True)
    ]
    return replace(one, layers=layers, parts=parts)


def layer_sizes(
    parts: list[Part], split: Sequence[float], n_gpu_layers: int, n_layer: int
) -> list[int]:
    """Bytes of each layer that is on a device, the output layer last."""
    numbers = [str(number) for number in range(len(parts) - 1)]
    places = place_layers(n_layer, n_gpu_layers, numbers, split)
    sizes = []
    for layer, place in enumerate(places):
        if place == CPU:
            continue
        part = parts[int(place)]
        count = places.count(place)
        if layer == n_layer and (part.blocks or count == 1):
            sizes.append(part.rest)
        elif part.blocks:
            sizes.append(part.blocks.get(layer, 0))
        else:
            # of a device that cannot be watched, all alike
            sizes.append((part.weights + part.kv) // count)
    return sizes


def layer_counts(found: Arrangement) -> list[float]:
    """How many layers each device has, as the split says."""
    placed = len(found.layers)
    numbers = [str(number) for number in range(len(found.split))]
    places = place_layers(placed - 1, placed, numbers, found.split)
    return [float(places.count(number)) for number in numbers]


def holds(split: Sequence[float], layers: Sequence[int], room: Sequence[int]) -> bool:
    """Whether each device has room for its layers. One without any needs none."""
    at = 0
    for count, space in zip(split, room, strict=True):
        if count and sum(layers[at : at + int(count)]) > space:
            return False
        at += int(count)
    return True
