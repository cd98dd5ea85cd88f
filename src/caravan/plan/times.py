"""`DeviceTimes`: how long one device takes for each layer of one model, by tokens and KV length.

Points of a grid, measured on the device itself (`probe`) or computed from its speeds (`work`), and
straight lines between them. Knows numbers only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

F64 = NDArray[np.float64]
I64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Grid:
    """Seconds of each layer at some points.

    Attributes:
        tokens: of a micro-batch, ascending.
        kv: entries of the KV cache that attention looks at, ascending.
        seconds: (len(tokens), len(kv), n_layer + 1); the last is the output layer.
    """

    tokens: tuple[int, ...]
    kv: tuple[int, ...]
    seconds: F64

    def at(self, n_tokens: int, n_kv: int) -> F64:
        """(n_layer + 1,) seconds; on lines through the nearest points, also beyond the last, and of
        `kv` before the first: attention goes by it, while few tokens take as long as one."""
        i, x = between(self.tokens, max(n_tokens, self.tokens[0]))
        j, y = between(self.kv, n_kv)
        s = self.seconds
        low = s[i, j] if x == 0 else s[i, j] * (1 - x) + s[i + 1, j] * x
        if y == 0:
            return np.asarray(np.maximum(low, 0.0))
        high = s[i, j + 1] if x == 0 else s[i, j + 1] * (1 - x) + s[i + 1, j + 1] * x
        return np.asarray(np.maximum(low * (1 - y) + high * y, 0.0))


def between(points: Sequence[int], value: float) -> tuple[int, float]:
    """The point to start from, and how far to the next one; below the first, less than nothing.

    Without NumPy, which takes its time: the simulator asks for each stage of each micro-batch.
    """
    if len(points) == 1:
        return 0, 0.0
    i = min(max(bisect_right(points, value) - 1, 0), len(points) - 2)
    return i, (value - points[i]) / (points[i + 1] - points[i])


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Of one device and one model.

    Attributes:
        prompt: micro-batches of a prompt none of whose tokens needs an output, so that the last
            layer is cut short and the output layer costs nothing.
        decode: every token has an output. `tokens` are sequences that take a step together.
    """

    prompt: Grid
    decode: Grid
