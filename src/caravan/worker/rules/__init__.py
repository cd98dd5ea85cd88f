"""Shape rules of the engine's operations, one file a family; importing this registers them all.

`registry.RULES` is what `validate` looks up.
"""

from caravan.worker.rules import elementwise, matmul, moves, rows

__all__ = ["elementwise", "matmul", "moves", "rows"]
