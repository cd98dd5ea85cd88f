"""No rule is narrower than the engine: what its own constructors make passes, and is computed."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from ctypes import c_bool, c_float, c_int, c_int64, c_void_p
from typing import Any

import numpy as np
import pytest

from caravan import engine
from caravan.engine import layouts
from caravan.engine.layouts import OP_NAMES
from caravan.worker.graph import Graph
from caravan.worker.native import CPU, NativeDevice
from caravan.worker.table import Table
from caravan.worker.validate import VIEW_OPS
from worker.corpus import BF16, F16, I32
from worker.raw_client import COMPUTE, F32, Q4_0, Q8_0, row
from worker.test_corpus import BASE, memory_of

_SIZE = 8 << 20
_STEP = 64 << 10


class Maker:
    """Makes tensors in a ggml context without data."""

    def __init__(self) -> None:
        self._engine = engine.load()
        self._memory = ctypes.create_string_buffer(1 << 20)
        start = self._engine.find("ggml_init")
        start.restype, start.argtypes = c_void_p, [layouts.InitParams]
        self._context = start(layouts.InitParams(1 << 20, ctypes.addressof(self._memory), True))

    def new(self, *ne: int, kind: int = F32) -> int:
        sizes = (c_int64 * 4)(*(*ne, 1, 1, 1)[:4])
        return self.call("ggml_new_tensor", c_int(kind), c_int(4), sizes)

    def call(self, name: str, *args: Any) -> int:
        """Tensors as plain numbers; everything else in its C type, ints as int."""
        function = self._engine.find(name)
        function.restype, function.argtypes = c_void_p, None
        converted = [c_void_p(self._context)]
        for arg in args:
            big = isinstance(arg, int) and arg > 1 << 20
            converted.append(c_void_p(arg) if big else c_int(arg) if isinstance(arg, int) else arg)
        return int(function(*converted))

    def table(self, result: int) -> Table:
        """The graph that computes it: nodes in order, then the rest."""
        order: list[int] = []
        self._walk(result, order)
        structs = [_read(address) for address in order]
        nodes = [k for k, struct in enumerate(structs) if struct["op"]]
        leaves = [k for k, struct in enumerate(structs) if not struct["op"]]
        index = {order[k]: place for place, k in enumerate([*nodes, *leaves])}
        places: dict[int, int] = {}
        rows = []
        for k in [*nodes, *leaves]:
            struct = structs[k]
            rows.append(row((1,), self._place(order[k], places)))
            for name in ("ne", "nb", "op", "op_params", "type"):
                rows[-1][name] = struct[name]
            rows[-1]["flags"] = COMPUTE
            rows[-1]["src"] = [index.get(int(source), -1) for source in struct["src"]]
        return Table(np.stack(rows), len(nodes))

    def _walk(self, address: int, order: list[int]) -> None:
        for source in _read(address)["src"].tolist():
            if source and source != address:
                self._walk(source, order)
        if address not in order:
            order.append(address)

    def _place(self, address: int, places: dict[int, int]) -> int:
        struct = _read(address)
        root = int(struct["view_src"])
        if root:
            return self._place(root, places) + int(struct["view_offs"])
        return BASE + places.setdefault(address, _STEP * len(places))


def _read(address: int) -> Any:
    size = layouts.GGML_TENSOR.itemsize
    return np.frombuffer(ctypes.string_at(address, size), layouts.GGML_TENSOR)[0]


def _permuted(m: Maker, tensor: int, *axes: int) -> int:
    return m.call("ggml_permute", tensor, *axes)


def _channels_first(m: Maker, w: int, h: int, c: int, n: int) -> int:
    """[w, h, c, n] that lies as [c, w, h, n]."""
    return _permuted(m, m.new(c, w, h, n), 2, 0, 1, 3)


Case = Callable[[Maker], int]

CASES: dict[str, Case] = {
    "conv_1d": lambda m: m.call("ggml_conv_1d", m.new(3, 4, 5, kind=F16), m.new(20, 4), 1, 1, 1),
    "conv_1d, strided, three at once": lambda m: m.call(
        "ggml_conv_1d_ph", m.new(5, 4, 6, kind=F16), m.new(21, 4, 3), 2, 2
    ),
    "conv_1d_dw": lambda m: m.call(
        "ggml_conv_1d_dw", m.new(4, 1, 8, kind=F16), m.new(16, 8), 1, 0, 1
    ),
    "conv_2d": lambda m: m.call(
        "ggml_conv_2d", m.new(3, 3, 4, 5, kind=F16), m.new(16, 12, 4, 2), 2, 1, 1, 1, 1, 1
    ),
    "conv_2d in bf16": lambda m: m.call(
        "ggml_conv_2d", m.new(2, 2, 3, 32, kind=BF16), m.new(8, 8, 3), 2, 2, 0, 0, 1, 1
    ),
    "conv_2d_dw": lambda m: m.call(
        "ggml_conv_2d_dw", m.new(3, 3, 1, 4, kind=F16), m.new(9, 9, 4), 1, 1, 1, 1, 1, 1
    ),
    "conv_2d_direct": lambda m: m.call(
        "ggml_conv_2d_direct", m.new(3, 3, 4, 5), _channels_first(m, 9, 7, 4, 2), 2, 2, 1, 1, 1, 1
    ),
    "conv_2d_dw_direct": lambda m: m.call(
        "ggml_conv_2d_dw_direct", m.new(3, 3, 1, 4), m.new(9, 7, 4, 2), 1, 1, 1, 1, 1, 1
    ),
    "conv_2d_dw_direct, channels first": lambda m: m.call(
        "ggml_conv_2d_dw_direct",
        _permuted(m, m.new(8, 1, 3, 3), 3, 2, 0, 1),
        _channels_first(m, 9, 7, 8, 2),
        *(1, 1, 1, 1, 1, 1),
    ),
    "conv_3d": lambda m: m.call(
        "ggml_conv_3d", m.new(2, 2, 2, 6, kind=F16), m.new(5, 4, 3, 4), c_int64(2),
        *(1, 1, 1, 0, 0, 0, 1, 1, 1),
    ),
    "conv_3d_direct": lambda m: m.call(
        "ggml_conv_3d_direct", m.new(2, 2, 2, 6), m.new(5, 4, 3, 4),
        *(1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 3),
    ),
    "conv_transpose_1d": lambda m: m.call(
        "ggml_conv_transpose_1d", m.new(4, 3, 5, kind=F16), m.new(7, 5), 2, 0, 1
    ),
    "conv_transpose_2d": lambda m: m.call(
        "ggml_conv_transpose_2d_p0", m.new(2, 2, 3, 4, kind=F16), m.new(5, 6, 4, 2), 2
    ),
    "col2im_1d": lambda m: m.call("ggml_col2im_1d", m.new(8, 5, kind=F16), 2, 2, 1),
    "pool_1d": lambda m: m.call("ggml_pool_1d", m.new(9, 4), 0, 3, 2, 1),
    "pool_2d": lambda m: m.call(
        "ggml_pool_2d", m.new(9, 7, 4, 2), 1, 3, 3, 2, 2, c_float(1.0), c_float(1.0)
    ),
    "upscale": lambda m: m.call("ggml_upscale", m.new(5, 4, 3), 3, 0),
    "interpolate": lambda m: m.call(
        "ggml_interpolate", _permuted(m, m.new(6, 5, 4), 1, 0, 2, 3),
        *(c_int64(n) for n in (9, 3, 4, 1)), 1 | 1 << 9,
    ),
    "pad": lambda m: m.call("ggml_pad_ext", m.new(5, 4, 3), 1, 2, 0, 1, 3, 0, 0, 1),
    "pad_reflect_1d": lambda m: m.call("ggml_pad_reflect_1d", m.new(7, 3), 2, 3),
    "roll": lambda m: m.call("ggml_roll", m.new(8, 6), 3, -2, 0, 0),
    "win_part": lambda m: m.call("ggml_win_part", m.new(8, 10, 9), 4),
    "win_unpart": lambda m: m.call(
        "ggml_win_unpart", m.call("ggml_win_part", m.new(8, 10, 9), 4), 10, 9, 4
    ),
    "rel_pos": lambda m: m.call("ggml_get_rel_pos", m.new(8, 9, kind=F16), 5, 5),
    "add_rel_pos": lambda m: m.call(
        "ggml_add_rel_pos", m.new(16, 12, 2), m.new(4, 4, 3, 2), m.new(4, 4, 3, 2)
    ),
    "timestep_embedding": lambda m: m.call("ggml_timestep_embedding", m.new(3), 9, 1000),
    "arange": lambda m: m.call("ggml_arange", c_float(1), c_float(9.5), c_float(0.75)),
    "norm of a transposed": lambda m: m.call(
        "ggml_norm", m.call("ggml_transpose", m.new(6, 5)), c_float(1e-5)
    ),
    "group_norm": lambda m: m.call("ggml_group_norm", m.new(4, 4, 8), 4, c_float(1e-5)),
    "concat of transposed": lambda m: m.call(
        "ggml_concat", m.call("ggml_transpose", m.new(6, 5)), m.new(5, 2), 1
    ),
    "concat of blocks": lambda m: m.call(
        "ggml_concat", m.new(32, 5, kind=Q8_0), m.new(64, 5, kind=Q8_0), 0
    ),
    "cast of a permuted": lambda m: m.call(
        "ggml_cast", _permuted(m, m.new(6, 5, 4), 2, 1, 0, 3), F16
    ),
    "cast from blocks": lambda m: m.call("ggml_cast", m.new(64, 5, kind=Q4_0), F32),
    "cast of whole numbers": lambda m: m.call("ggml_cast", m.new(7, kind=I32), F32),
    "cont of a permuted": lambda m: m.call(
        "ggml_cont", _permuted(m, m.new(6, 5, 4, kind=F16), 1, 2, 0, 3)
    ),
    "repeat of a column": lambda m: m.call(
        "ggml_repeat_4d", m.new(1, 5), *(c_int64(n) for n in (6, 5, 2, 1))
    ),
    "softplus of a column": lambda m: m.call("ggml_softplus", m.new(1, 5)),
    "sigmoid of a transposed row": lambda m: m.call(
        "ggml_sum_rows", m.call("ggml_sigmoid", m.call("ggml_transpose", m.new(1, 9)))
    ),
    "set_rows of columns": lambda m: m.call(
        "ggml_set_rows", m.new(1, 9, 2, kind=F16), m.new(1, 4, 2), m.new(4, 2, kind=I32)
    ),
    "argsort_top_k": lambda m: m.call("ggml_argsort_top_k", m.new(16, 5), 4),
    "experts by choice": lambda m: m.call(
        "ggml_mul_mat_id", m.new(32, 8, 4, kind=Q4_0), m.new(32, 1, 5),
        m.call("ggml_argsort_top_k", m.new(4, 5), 2),
    ),
    "swiglu": lambda m: m.call("ggml_swiglu", m.new(16, 5)),
    "add_id": lambda m: m.call(
        "ggml_add_id", m.new(8, 3, 2), m.new(8, 4), m.new(3, 2, kind=I32)
    ),
    "diag": lambda m: m.call("ggml_diag", m.new(5, 1, 3)),
    "tri": lambda m: m.call("ggml_tri", m.new(5, 5, 3), 3),
    "solve_tri": lambda m: m.call(
        "ggml_solve_tri", m.new(5, 5, 2), m.new(3, 5, 2), c_bool(True), c_bool(True), c_bool(False)
    ),
    "soft_max": lambda m: m.call(
        "ggml_soft_max_ext", m.new(16, 4, 6, 2), m.new(16, 8, 1, 2, kind=F16),
        c_float(0.5), c_float(8.0),
    ),
    "set": lambda m: m.call(
        "ggml_set_1d", m.new(20), m.new(6), ctypes.c_size_t(16)
    ),
    "argmax": lambda m: m.call("ggml_argmax", m.new(16, 5)),
    "mean": lambda m: m.call("ggml_mean", m.call("ggml_sqr", m.new(16, 5))),
    "sum": lambda m: m.call("ggml_sum", m.new(16, 5)),
}  # fmt: skip


@pytest.fixture(scope="module")
def device() -> Iterator[NativeDevice]:
    loaded = engine.load()
    handle = next(h for h in loaded.ggml.devices() if loaded.ggml.dev_type(h) == CPU)
    yield NativeDevice(loaded, handle, 0, 2)


@pytest.mark.parametrize("name", CASES)
def test_what_the_engine_makes_passes_and_is_computed(name, device) -> None:
    maker = Maker()
    table = maker.table(CASES[name](maker))
    buffer = device.allocate(_SIZE)
    buffer.clear(0)
    try:
        graph = Graph(table, memory_of(buffer.size, buffer.base, buffer.pointer), device)
        assert device.compute(graph) == 0
    finally:
        buffer.free()
    ops = {OP_NAMES[op] for op in table.rows["op"][: table.n_nodes] if not VIEW_OPS[op]}
    assert ops
