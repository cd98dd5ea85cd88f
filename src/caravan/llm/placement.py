"""Which device holds which layer: the engine's own rule for split mode `layer`, computed again.

The engine does not tell, so this follows it in single precision, rounding and all. Knows shares and
layer numbers; called by `model`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

CPU = "CPU"
# of a layer: no two machines have exactly as much free memory, and are to get equally many layers
_ALIKE = 0.1


def split_points(shares: Sequence[float]) -> NDArray[np.float32]:
    """Where each device's part of the layers ends, as a fraction of them."""
    ends = np.cumsum(np.asarray(shares, np.float32), dtype=np.float32)
    points: NDArray[np.float32] = ends / ends[-1]
    return points


def whole_layers(n_layer: int, n_gpu_layers: int, shares: Sequence[float]) -> list[float]:
    """Shares for the engine that give each device a whole number of layers, near `shares`.

    The engine rounds every border up, so that of two equal devices the first gets 16 of 30 blocks
    and the second 14 and the output. Rounded down it is 15 and 15, which is what counts for a
    prompt: its stages are as fast as the slowest, and only the last token needs the output.
    """
    total = n_layer + 1
    placed = min(total if n_gpu_layers < 0 else n_gpu_layers, total)
    if len(shares) < 2 or placed < len(shares) or sum(shares) <= 0:
        return list(shares)
    ends = np.floor(np.cumsum(shares, dtype=np.float64) / sum(shares) * placed + _ALIKE)
    ends[-1] = placed
    counts = np.diff(ends, prepend=0)
    if any(share > 0 and count == 0 for share, count in zip(shares, counts, strict=True)):
        # too uneven to round: what the engine does leaves no device out
        return list(shares)
    return [float(count) for count in counts]


def place_layers(
    n_layer: int, n_gpu_layers: int, names: Sequence[str], shares: Sequence[float]
) -> list[str]:
    """The device of each layer, the output layer (number `n_layer`) last.

    Args:
        n_layer: layers of the model without the output layer.
        n_gpu_layers: how many are not the CPU's, counted from the end; negative for all.
        names: of the devices.
        shares: of the devices, in any unit.
    """
    total = n_layer + 1
    wanted = total if n_gpu_layers < 0 else n_gpu_layers
    placed = min(wanted, total) if names and sum(shares) > 0 else 0
    first = total - placed
    if not placed:
        return [CPU] * total
    fractions = np.arange(placed, dtype=np.float32) / np.float32(placed)
    numbers = np.searchsorted(split_points(shares), fractions, side="right")
    return [CPU] * first + [names[number] for number in numbers]


def filled_layers(sizes: Sequence[int], room: Sequence[int]) -> list[float] | None:
    """How many of some layers each device gets, in order, so that all are filled alike.

    The fullest device is as empty as it can be; it may be more than full, if nothing else is
    possible. None where no device has any room.

    Args:
        sizes: bytes of each layer that goes to a device, the output layer last.
        room: bytes that each device has for layers.
    """
    if max(room) <= 0:
        return None
    # every border is between two layers, so these are all the fillings that can be the fullest
    ends = np.concatenate(([0], np.cumsum(np.asarray(sizes, np.float64))))
    runs = np.unique(ends[None, :] - ends[:, None])
    rooms = np.asarray([space for space in room if space > 0], np.float64)
    fillings = np.unique(runs[runs > 0, None] / rooms)
    low, high = 0, len(fillings) - 1
    while low < high:
        middle = (low + high) // 2
        if _filled(sizes, room, fillings[middle]) is None:
            low = middle + 1
        else:
            high = middle
    return _filled(sizes, room, fillings[high])


def _filled(sizes: Sequence[int], room: Sequence[int], filling: float) -> list[float] | None:
    """As many layers for each device as go into such a part of its room; None if some are left."""
    counts = []
    at = 0
    for space in room:
        start, used = at, 0
        # rounding must not turn away the layer that the filling was computed from
        most = max(0.0, space * filling) * (1 + 1e-12)
        while at < len(sizes) and used + sizes[at] <= most:
            used += sizes[at]
            at += 1
        counts.append(float(at - start))
    return counts if at == len(sizes) else None
