"""Rules of the engine's operations, one file a family; importing this registers them all.

`registry.RULES` is what `validate` looks up.
"""

from caravan.worker.rules import (
    attention,
    convolution,
    elementwise,
    indexed,
    matmul,
    moves,
    recurrent,
    rows,
    shapes,
)

__all__ = [
    "attention",
    "convolution",
    "elementwise",
    "indexed",
    "matmul",
    "moves",
    "recurrent",
    "rows",
    "shapes",
]
