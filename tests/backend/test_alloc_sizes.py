"""What a worker says of the room that a tensor needs: asked once, and never taken for too much."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from caravan.backend.buffer import TensorSizes
from caravan.engine import layouts
from caravan.errors import RemoteError
from caravan.wire.extension import MAX_BUFFER_SIZE

_OWN = 1000


class Lying:
    """A link to a worker that says what it likes."""

    def __init__(self, answer: int) -> None:
        self.answer = answer
        self.asked = 0

    def alloc_size(self, tensor: object, sources: object) -> int:
        self.asked += 1
        if self.answer < 0:
            raise RemoteError(1, "no")
        return self.answer


@pytest.mark.parametrize(
    ("answer", "taken"),
    [
        (0, _OWN),
        (_OWN - 1, _OWN),
        (5000, 5000),
        (MAX_BUFFER_SIZE, MAX_BUFFER_SIZE),
        (1 << 50, MAX_BUFFER_SIZE + 1),
        ((1 << 64) - 1, MAX_BUFFER_SIZE + 1),
        (-1, _OWN),
    ],
)
def test_an_answer_is_bounded_on_both_sides(answer, taken):
    tensor = np.zeros(1, layouts.GGML_TENSOR)
    tensor["op"] = layouts.OP_NAMES.index("MUL_MAT")
    tensor["ne"], tensor["nb"] = (8, 1, 1, 1), (4, 32, 32, 32)
    link = Lying(answer)
    ggml = SimpleNamespace(nbytes=lambda pointer: _OWN, is_quantized=lambda kind: False)
    sizes = TensorSizes(SimpleNamespace(plugin=SimpleNamespace(ggml=ggml), link=link))
    assert [sizes.alloc_size(tensor.ctypes.data) for _ in range(2)] == [taken, taken]
    assert link.asked == (2 if answer < 0 else 1)
