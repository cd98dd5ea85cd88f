"""Graphs of one op each, as the engine makes them, and the same with one thing wrong.

Every `Good` is computed by the real kernels, every bad one must be refused. What is wrong is given
as what stands in the place of `d` (the result), of a source (by number) or of parameters (`p`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from caravan.engine.layouts import OP_NAMES, TYPE_BLOCK, TYPE_BYTES
from caravan.worker.table import Table
from worker.raw_client import COMPUTE, F32, I32, Q4_0, Q8_0, row

F16, Q8_1, Q2_K, Q8_K, IQ2_XXS, I8, I16, I64, F64, BF16 = 1, 9, 10, 15, 16, 24, 25, 27, 28, 30
GAP = 512


@dataclass(frozen=True)
class T:
    """A tensor.

    Attributes:
        nb: its strides; without, there are no gaps.
        top: whole numbers count up to here and begin anew.
        at: which tensor's place it has, as a number of `tensors`; without, one of its own.
        shift: bytes that it is moved by.
    """

    ne: tuple[int, ...]
    kind: int = F32
    nb: tuple[int, ...] | None = None
    top: int = 1
    at: int | None = None
    shift: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        return (*self.ne, 1, 1, 1)[:4]

    @property
    def strides(self) -> tuple[int, ...]:
        if self.nb is not None:
            return self.nb
        nb = [int(TYPE_BYTES[self.kind])]
        nb.append(nb[0] * (self.sizes[0] // max(int(TYPE_BLOCK[self.kind]), 1)))
        for size in self.sizes[1:3]:
            nb.append(nb[-1] * size)
        return tuple(nb)

    @property
    def nbytes(self) -> int:
        steps = [(n - 1) * s for n, s in zip(self.sizes, self.strides, strict=True)]
        if TYPE_BLOCK[self.kind] > 1:
            steps[0] = self.sizes[0] // int(TYPE_BLOCK[self.kind]) * self.strides[0]
            return sum(steps)
        return int(TYPE_BYTES[self.kind]) + sum(steps) if all(self.sizes) else 0


Params = dict[int, float]
Change = dict[Any, Any]


@dataclass(frozen=True)
class Good:
    """A graph that is sound.

    Attributes:
        p: parameters; what is a float goes in as one.
        bad: what makes it unsound, and words of the answer.
    """

    op: str
    d: T
    s: tuple[T | None, ...] = ()
    p: Params = field(default_factory=dict)
    bad: tuple[tuple[str, Change], ...] = ()

    @property
    def tensors(self) -> list[T]:
        """The result, and the sources that there are."""
        return [self.d, *(source for source in self.s if source is not None)]

    def places(self) -> list[int]:
        """Where the tensors lie, and last where they end."""
        places: list[int] = []
        end = GAP
        for tensor in self.tensors:
            if tensor.at is not None:
                places.append(places[tensor.at] + tensor.shift)
                continue
            places.append(end + tensor.shift)
            end = -(-(end + max(tensor.nbytes, 0) + GAP) // 64) * 64
        return [*places, end]

    def table(self, base: int) -> Table:
        places = self.places()
        src, count = [], 0
        for source in self.s:
            count += source is not None
            src.append(-1 if source is None else count)
        rows = [
            row(t.ne, base + at, kind=t.kind, nb=t.strides)
            for t, at in zip(self.tensors, places, strict=False)
        ]
        for k, source in enumerate(rows):
            source["name"] = f"source {k - 1}".encode() if k else b"the node"
        node = rows[0]
        node["op"], node["flags"] = OP_NAMES.index(self.op), COMPUTE
        node["src"][: len(src)] = src
        for k, value in self.p.items():
            whole = isinstance(value, int)
            node["op_params"][k] = value if whole else np.float32(value).view(np.int32)
        return Table(np.stack(rows), 1)

    def spoiled(self, change: Change) -> Good:
        """Itself, with something wrong."""
        s = list(self.s)
        for k in change:
            if isinstance(k, int):
                s[k:] = [change[k], *s[k + 1 :]]
        p = {**self.p, **change.get("p", {})}
        return replace(self, d=change.get("d", self.d), s=tuple(s), p=p)


def data_of(tensor: T) -> bytes:
    """Something to compute with, over its whole extent."""
    if tensor.kind in (I32, I64):
        dtype = np.int32 if tensor.kind == I32 else np.int64
        count = tensor.nbytes // np.dtype(dtype).itemsize
        return (np.arange(count) % tensor.top).astype(dtype).tobytes()
    if tensor.kind in (F32, F16):
        dtype = np.float32 if tensor.kind == F32 else np.float16
        count = tensor.nbytes // np.dtype(dtype).itemsize
        return (0.1 + 0.8 * (np.arange(count) % 17) / 17).astype(dtype).tobytes()
    return b"\x2e" * tensor.nbytes  # as scales of blocks: 0.096


def bad_graphs() -> Iterator[tuple[str, Good, str]]:
    """Name, graph, and words of the answer."""
    for name, good in GOODS.items():
        for number, (words, change) in enumerate(good.bad):
            yield f"{name} {number}: {words}", good.spoiled(change), words


def _binary(op: str, *more: tuple[str, Change]) -> Good:
    bad = (
        ("differ in shape", {"d": T((8, 3))}),
        ("does not repeat", {1: T((3,))}),
        ("types do not go", {1: T((8,), F64)}),
        ("types do not go", {"d": T((8, 4), F16)}),
        ("not adjacent", {0: T((8, 4), nb=(8, 64, 256, 256))}),
        ("not aligned", {1: T((8,), shift=2)}),
    )
    return Good(op, T((8, 4)), (T((8, 4)), T((8,))), bad=(*bad, *more))


def _plain(op: str, *kinds: int) -> Good:
    """An op on single elements, and a type that it has no code for."""
    bad = (
        ("differ in shape", {"d": T((4,))}),
        *((("without|in type", {"d": T((8, 4), k), 0: T((8, 4), k)})) for k in kinds),
        ("not adjacent", {0: T((8, 4), nb=(8, 64, 256, 256))}),
    )
    return Good(op, T((8, 4)), (T((8, 4)),), bad=bad)


def _attention(op: str, names: str, state: int) -> Good:
    """RWKV and its kin: two sequences of three tokens, two heads of 64."""
    shapes = {"t": T((64, 2, 6)), "f": T((64, 2)), "s": T((64 * 64 * 2, 2))}
    s = tuple(shapes[name] for name in names)
    bad = (
        ("wrong shape", {"d": T((128, 6 + 127))}),
        ("differ in shape", {1: T((64, 2, 5))}),
        ("wrong size", {state: T((64 * 64 * 2 - 1, 2))}),
        ("differ in length", {state: T((64 * 64 * 2, 4)), "d": T((128, 6 + 256))}),
        ("not contiguous", {0: T((64, 2, 6), nb=(4, 512, 1024, 6144))}),
    )
    return Good(op, T((128, 6 + 128)), s, bad=bad)


_MASK = T((16, 4), F16)
_CONV = {0: 1, 1: 1, 2: 0, 3: 0, 4: 1, 5: 1}
_ROPE = {1: 8, 2: 0, 5: 10000.0, 6: 1.0, 8: 1.0}
_SECTIONS = {11: 1, 12: 1, 13: 1, 14: 1}

GOODS: dict[str, Good] = {
    # arithmetic
    "ADD": _binary("ADD"),
    "SUB": _binary("SUB", ("types do not go", {0: T((32, 4), Q4_0), "d": T((32, 4), Q4_0)})),
    "MUL": _binary("MUL", ("no elements", {1: T((0,))})),
    "DIV": _binary("DIV"),
    "ADD to blocks": Good(
        "ADD",
        T((64, 2), Q4_0),
        (T((64, 2), Q4_0), T((64, 2))),
        bad=(
            ("does not match quantized", {1: T((64,))}),
            ("cannot be added to", {"d": T((256,), IQ2_XXS), 0: T((256,), IQ2_XXS), 1: T((256,))}),
            ("within a block", {0: T((48, 2), Q4_0, nb=(18, 36, 72, 72))}),
        ),
    ),
    "ADD1": Good(
        "ADD1",
        T((8, 4)),
        (T((8, 4)), T((1,))),
        bad=(("not a scalar", {1: T((2,))}), ("do not go together", {1: T((1,), I32)})),
    ),
    "ADD_ID": Good(
        "ADD_ID",
        T((8, 3, 2)),
        (T((8, 3, 2)), T((8, 5)), T((3, 2), I32, top=5)),
        bad=(
            ("do not match", {2: T((2, 2), I32)}),
            ("differ in length", {1: T((7, 5))}),
            ("not i32", {2: T((3, 2))}),
            ("not all are f32", {1: T((8, 5), F16)}),
        ),
    ),
    "SQR": _plain("SQR", I32),
    "SQRT": _plain("SQRT", I32),
    "LOG": _plain("LOG", I32),
    "SIN": _plain("SIN", F64),
    "COS": _plain("COS", F64),
    "CLAMP": replace(_plain("CLAMP", BF16, I32), p={0: 0.0, 1: 1.0}),
    "CLAMP out of line": Good(
        "CLAMP",
        T((4, 2, 2)),
        (T((4, 2, 2), nb=(4, 32, 16, 64)),),
        {0: 0.0, 1: 1.0},
        bad=(("lead out of", {0: T((4, 2, 2), nb=(4, 2048, 16, 64))}),),
    ),
    "LEAKY_RELU": _plain("LEAKY_RELU", BF16),
    "SCALE": _plain("SCALE", F16, I32),
    "FILL": _plain("FILL", BF16, I32),
    "UNARY silu": replace(
        _plain("UNARY", I32),
        p={0: 10},
        bad=(
            ("unknown unary op", {"p": {0: 22}}),
            ("unknown unary op", {"p": {0: -1}}),
            ("differ in type", {0: T((8, 4), F16)}),
        ),
    ),
    "UNARY xielu": replace(
        _plain("UNARY"),
        p={0: 17},
        bad=(("evenly spaced", {0: T((8, 2, 2), nb=(4, 64, 32, 128)), "d": T((8, 2, 2))}),),
    ),
    "GLU": Good(
        "GLU",
        T((4, 3)),
        (T((8, 3)),),
        {0: 2},
        bad=(
            ("unknown GLU", {"p": {0: 7}}),
            ("odd length", {0: T((9, 3))}),
            ("wrong length", {"d": T((8, 3))}),
            ("without code", {0: T((8, 3), I32), "d": T((4, 3), I32)}),
            ("in type", {0: T((8, 3), F16)}),
        ),
    ),
    "GLU of two": Good(
        "GLU",
        T((8, 3)),
        (T((8, 3)), T((8, 3))),
        {0: 0},
        bad=(("differ in shape", {1: T((8, 2))}), ("in type", {1: T((8, 3), F16)})),
    ),
    "GLU clamped": Good(
        "GLU",
        T((8, 3), F16),
        (T((8, 3), F16), T((8, 3), F16)),
        {0: 6, 3: 1.0},
        bad=(("without code", {"p": {0: 3}}),),
    ),
    # copies
    "DUP": Good(
        "DUP",
        T((8, 4)),
        (T((4, 8)),),
        bad=(("differ in type", {0: T((8, 4), F16)}), ("differ in size", {0: T((8, 3))})),
    ),
    "CONT": Good(
        "CONT",
        T((4, 8)),
        (T((4, 8), nb=(32, 4, 128, 128)),),
        bad=(
            ("differ in size", {"d": T((4, 9))}),
            ("cannot be gathered", {"d": T((128,), Q4_0), 0: T((64, 2), Q4_0, (18, 72, 144, 144))}),
        ),
    ),
    "CPY into blocks": Good(
        "CPY",
        T((64, 2), Q8_0),
        (T((64, 2)), T((64, 2), Q8_0, at=0)),
        bad=(
            ("differ in layout", {1: T((32, 4), Q8_0, at=0)}),
            ("do not fit the result's blocks", {0: T((128,))}),
            ("do not fit the result's blocks", {0: T((2, 64), nb=(256, 4, 512, 512))}),
            ("no conversion", {0: T((64, 2), I32)}),
            ("in type", {1: T((64, 2), Q4_0, at=0)}),
        ),
    ),
    "CPY from blocks": Good(
        "CPY",
        T((64, 2)),
        (T((64, 2), Q4_0), T((64, 2), at=0)),
        bad=(
            ("differ in layout", {"d": T((64, 2), nb=(4, 512, 1024, 1024))}),
            ("no conversion", {"d": T((64, 2), F16), 1: T((64, 2), F16, at=0)}),
            ("no conversion", {0: T((256,), Q8_K), "d": T((256,)), 1: T((256,), at=0)}),
        ),
    ),
    "CPY to half": Good(
        "CPY",
        T((8, 4), F16),
        (T((32,)), T((8, 4), F16, at=0)),
        bad=(("no conversion", {0: T((32,), I64)}), ("source 1 is missing", {1: None})),
    ),
    "SET": Good(
        "SET",
        T((8, 4)),
        (T((8, 4)), T((4, 2))),
        {0: 32, 1: 128, 2: 128, 3: 16},
        bad=(
            ("does not fit", {"p": {3: 100}}),
            ("does not fit", {"p": {0: 1 << 30}}),
            ("negative", {"p": {3: -4}}),
            ("not aligned", {"p": {3: 18}}),
            ("without code", {"d": T((8, 4), F16), 0: T((8, 4), F16), 1: T((4, 2), F16)}),
        ),
    ),
    "ACC": Good(
        "ACC",
        T((8, 4)),
        (T((8, 4)), T((8, 2))),
        {0: 32, 1: 128, 2: 128, 3: 64},
        bad=(
            ("does not fit", {"p": {3: 96}}),
            ("negative", {"p": {0: -32}}),
            ("types differ", {1: T((8, 2), I32)}),
        ),
    ),
    "DIAG": Good(
        "DIAG",
        T((4, 4, 2)),
        (T((4, 1, 2)),),
        bad=(("wrong shape", {"d": T((4, 3, 2))}), ("more than one row", {0: T((4, 2, 1))})),
    ),
    "DIAG_MASK_INF": Good(
        "DIAG_MASK_INF",
        T((4, 4)),
        (T((4, 4)),),
        {0: 1},
        bad=(
            ("before the row", {"p": {0: -1}}),
            ("not contiguous", {"d": T((4, 4), nb=(4, 32, 128, 128))}),
            ("not contiguous", {"d": T((4, 4, 1, 3), nb=(4, 16, 1 << 20, 64)), 0: T((4, 4, 1, 3))}),
        ),
    ),
    "DIAG_MASK_ZERO": Good(
        "DIAG_MASK_ZERO",
        T((4, 4)),
        (T((4, 4)),),
        bad=(("not f32", {0: T((4, 4), F16)}), ("in shape", {0: T((4, 3))})),
    ),
    "TRI": Good(
        "TRI",
        T((4, 4)),
        (T((4, 4)),),
        {0: 2},
        bad=(
            ("unknown kind", {"p": {0: 4}}),
            ("not contiguous", {0: T((4, 4), nb=(4, 32, 128, 128))}),
        ),
    ),
    "ARANGE": Good(
        "ARANGE",
        T((5,)),
        (),
        {0: 0.0, 1: 10.0, 2: 2.0},
        bad=(
            ("as many elements", {"p": {1: 1e6}}),
            ("as many elements", {"p": {2: 0.0}}),
            ("not contiguous", {"d": T((5,), F16)}),
        ),
    ),
    # by number
    "GET_ROWS": Good(
        "GET_ROWS",
        T((8, 3)),
        (T((8, 5)), T((3,), I32, top=5)),
        bad=(
            ("wrong shape", {"d": T((8, 2))}),
            ("not i32", {1: T((3,))}),
            ("do not match", {0: T((8, 5, 2))}),
            ("without code", {0: T((8, 5), I64)}),
        ),
    ),
    "GET_ROWS of half": Good(
        "GET_ROWS",
        T((8, 3)),
        (T((8, 5), F16), T((3,), I32, top=5)),
        bad=(("type is not possible", {"d": T((8, 3), F16)}),),
    ),
    "GET_ROWS of blocks": Good(
        "GET_ROWS",
        T((256, 3)),
        (T((256, 5), Q2_K), T((3,), I32, top=5)),
        bad=(("without code", {0: T((256, 5), Q8_K)}), ("without code", {0: T((256, 5), Q8_1)})),
    ),
    "SET_ROWS": Good(
        "SET_ROWS",
        T((32, 9), Q8_0),
        (T((32, 3)), T((3,), I64, top=9)),
        bad=(
            ("do not match", {1: T((2,), I64)}),
            ("neither i32 nor i64", {1: T((3,))}),
            ("source differ", {0: T((64, 3))}),
            ("not possible", {0: T((32, 3), F16)}),
            ("not possible", {"d": T((32, 9), I64)}),
            ("not aligned", {1: T((3,), I64, shift=4)}),
        ),
    ),
    "ARGSORT": Good(
        "ARGSORT",
        T((20, 3), I32),
        (T((20, 3)),),
        {0: 1},
        bad=(
            ("sort order", {"p": {0: 2}}),
            ("in shape", {"d": T((9, 3), I32)}),
            ("f32 to i32", {0: T((20, 3), F16)}),
        ),
    ),
    "TOP_K": Good(
        "TOP_K",
        T((3, 2), I32),
        (T((8, 2)),),
        bad=(
            ("more is asked", {"d": T((9, 2), I32)}),
            ("evenly spaced", {0: T((8, 1, 2), nb=(4, 1 << 20, 32, 64)), "d": T((3, 1, 2), I32)}),
        ),
    ),
    "ARGMAX": Good(
        "ARGMAX",
        T((4,), I32),
        (T((8, 4)),),
        bad=(("one element for", {"d": T((3,), I32)}), ("not a matrix", {0: T((8, 4, 2))})),
    ),
    "GET_REL_POS": Good(
        "GET_REL_POS",
        T((8, 3, 3), F16),
        (T((8, 5), F16),),
        bad=(("too few positions", {0: T((8, 4), F16)}), ("do not go", {"d": T((8, 3, 3))})),
    ),
    # rows
    "NORM": Good(
        "NORM",
        T((8, 4)),
        (T((8, 4), nb=(16, 4, 128, 128)),),
        {0: 1e-5},
        bad=(("epsilon", {"p": {0: -1.0}}), ("epsilon", {"p": {0: float("nan")}})),
    ),
    "RMS_NORM": Good(
        "RMS_NORM",
        T((8, 4)),
        (T((8, 4)),),
        {0: 1e-5},
        bad=(
            ("in shape", {"d": T((8, 3))}),
            ("not adjacent", {"d": T((8, 4), nb=(16, 4, 128, 128))}),
            ("not f32", {0: T((8, 4), F16)}),
        ),
    ),
    "L2_NORM": Good(
        "L2_NORM",
        T((8, 4)),
        (T((8, 4)),),
        bad=(("in shape", {"d": T((4,))}), ("not f32", {"d": T((8, 4), F16)})),
    ),
    "GROUP_NORM": Good(
        "GROUP_NORM",
        T((4, 4, 4)),
        (T((4, 4, 4)),),
        {0: 2, 1: 1e-5},
        bad=(
            ("no groups", {"p": {0: 0}}),
            ("too many", {"p": {0: 5}}),
            ("epsilon", {"p": {1: -1.0}}),
        ),
    ),
    "CUMSUM": Good(
        "CUMSUM",
        T((8, 4)),
        (T((8, 4)),),
        bad=(("in shape", {"d": T((7, 4))}), ("not f32", {0: T((8, 4), F16)})),
    ),
    "SUM": Good(
        "SUM",
        T((1,)),
        (T((8, 4)),),
        bad=(
            ("not a scalar", {"d": T((2,))}),
            ("not adjacent", {0: T((8, 4), nb=(16, 4, 128, 128))}),
        ),
    ),
    "SUM_ROWS": Good(
        "SUM_ROWS",
        T((1, 4)),
        (T((8, 4)),),
        bad=(("more than one", {"d": T((2, 4))}), ("differ in rows", {"d": T((1, 3))})),
    ),
    "MEAN": Good(
        "MEAN",
        T((1, 4)),
        (T((8, 4)),),
        bad=(
            ("not f32", {0: T((8, 4), F16)}),
            ("not adjacent", {0: T((8, 4), nb=(16, 4, 128, 128))}),
        ),
    ),
    "ROPE": Good(
        "ROPE",
        T((8, 2, 3)),
        (T((8, 2, 3)), T((3,), I32, top=9)),
        _ROPE,
        bad=(
            ("not even", {"p": {1: 0}}),
            ("not even", {"p": {1: 7}}),
            ("more dimensions", {"p": {1: 10}}),
            ("more dimensions", {"p": {15: 2}}),
            ("offset", {"p": {15: -2}}),
            ("unknown mode", {"p": {2: 1}}),
            ("too few positions", {1: T((2,), I32)}),
            ("in type", {"d": T((8, 2, 3), F16)}),
        ),
    ),
    "ROPE with factors": Good(
        "ROPE",
        T((64, 2, 3)),
        (T((64, 2, 3)), T((3,), I32, top=9), T((16,))),
        {**_ROPE, 1: 32},
        bad=(
            ("too few frequency", {2: T((15,))}),
            ("before the buffer's end", {2: T((16,), shift=GAP)}),
        ),
    ),
    "ROPE in sections": Good(
        "ROPE",
        T((8, 2, 3)),
        (T((8, 2, 3)), T((12,), I32, top=9)),
        {**_ROPE, **_SECTIONS, 2: 8},
        bad=(
            ("no size", {"p": {11: 1, 12: -1, 13: 0, 14: 0}}),
            ("no size", {"p": {11: 0, 12: 0, 13: 0, 14: 4}}),
            ("too big", {"p": {11: 9}}),
            ("too few positions", {1: T((3,), I32)}),
            ("half a row", {"p": {2: 24}}),
        ),
    ),
    "ROPE_BACK": Good(
        "ROPE_BACK",
        T((8, 2, 3)),
        (T((8, 2, 3)), T((3,), I32, top=9)),
        {**_ROPE, 2: 2},
        bad=(("not i32", {1: T((3,))}), ("in shape", {"d": T((8, 2, 2))})),
    ),
    "SOFT_MAX": Good(
        "SOFT_MAX",
        T((8, 4, 6)),
        (T((8, 4, 6)), T((8, 4), F16), T((6,))),
        {0: 1.0},
        bad=(
            ("too few rows", {1: T((8, 3), F16)}),
            ("too short", {1: T((7, 4), F16)}),
            ("does not repeat", {1: T((8, 4, 4), F16)}),
            ("do not match the heads", {2: T((5,))}),
            ("neither f32 nor f16", {1: T((8, 4), I32)}),
        ),
    ),
    "FLASH_ATTN_EXT": Good(
        "FLASH_ATTN_EXT",
        T((32, 2, 4)),
        (T((32, 4, 2)), T((32, 16, 1), Q8_0), T((32, 16, 1), Q8_0), _MASK, T((2,))),
        {0: 1.0},
        bad=(
            ("differ in number", {2: T((32, 15, 1), Q8_0)}),
            ("differ in length", {1: T((64, 16, 1), Q8_0)}),
            ("heads do not divide", {1: T((32, 16, 3), Q8_0)}),
            ("too few rows", {3: T((16, 3), F16)}),
            ("too short", {3: T((15, 4), F16)}),
            ("not f16", {3: T((16, 4))}),
            ("wrong shape", {"d": T((32, 4, 2))}),
            ("without arithmetic", {1: T((32, 16, 1), Q8_1)}),
            ("precision", {"p": {3: 7}}),
            ("not contiguous", {"d": T((32, 2, 4), nb=(4, 256, 512, 2048))}),
            ("sinks do not match", {4: T((1,))}),
        ),
    ),
    "LIGHTNING_INDEXER": Good(
        "LIGHTNING_INDEXER",
        T((16, 3)),
        (T((32, 4, 3)), T((32, 1, 16), F16), T((4, 3)), T((16, 3), F16)),
        bad=(
            ("keys have", {1: T((16, 1, 16), F16)}),
            ("weights have", {2: T((4, 2))}),
            ("mask has", {3: T((15, 3), F16)}),
            ("result has", {"d": T((16, 2))}),
            ("without arithmetic", {1: T((32, 1, 16), I16)}),
        ),
    ),
    # products
    "MUL_MAT": Good(
        "MUL_MAT",
        T((4, 3, 2)),
        (T((32, 4), Q4_0), T((32, 3, 2))),
        bad=(
            ("differ in length", {1: T((31, 3, 2))}),
            ("wrong shape", {"d": T((4, 3))}),
            ("does not repeat", {0: T((32, 4, 3), Q4_0)}),
            ("without arithmetic", {0: T((32, 4), Q8_1)}),
            ("without arithmetic", {0: T((32, 4), I8)}),
            ("without arithmetic", {1: T((32, 3, 2), Q8_0)}),
            ("transposed", {"d": T((4, 3, 2), nb=(4, 32, 16, 96))}),
            ("not adjacent", {1: T((32, 3, 2), nb=(12, 4, 384, 768))}),
            ("scratch memory", {1: T((32, 1 << 26, 2), nb=(4, 0, 0, 0)), "d": T((4, 1 << 26, 2))}),
        ),
    ),
    "MUL_MAT by Hadamard": Good(
        "MUL_MAT",
        T((32, 3)),
        (T((32, 32)), T((32, 3))),
        {1: 1},
        bad=(
            ("Hadamard", {0: T((32, 4)), "d": T((4, 3))}),
            ("Hadamard", {0: T((24, 24)), 1: T((24, 3)), "d": T((24, 3))}),
        ),
    ),
    "MUL_MAT_ID": Good(
        "MUL_MAT_ID",
        T((4, 2, 3)),
        (T((32, 4, 5), Q4_0), T((32, 1, 3)), T((2, 3), I32, top=5)),
        bad=(
            ("not i32", {2: T((2, 3))}),
            ("do not match", {2: T((2, 2), I32)}),
            ("wrong shape", {"d": T((4, 2, 2))}),
            ("does not repeat", {1: T((32, 3, 3))}),
            ("differ in length", {1: T((64, 1, 3))}),
            ("without arithmetic", {1: T((32, 1, 3), Q8_0)}),
            ("do not go together", {1: T((32, 1, 3), F16)}),
            ("source 2 is missing", {2: None}),
        ),
    ),
    # shapes
    "REPEAT": Good(
        "REPEAT",
        T((8, 4)),
        (T((4, 2)),),
        bad=(
            ("does not repeat", {"d": T((8, 5))}),
            ("without code", {"d": T((8, 4), F64), 0: T((4, 2), F64)}),
            ("no elements", {0: T((4, 0))}),
        ),
    ),
    "CONCAT": Good(
        "CONCAT",
        T((8, 5)),
        (T((8, 2)), T((8, 3))),
        {0: 1},
        bad=(
            ("no such dimension", {"p": {0: 4}}),
            ("no such dimension", {"p": {0: -1}}),
            ("wrong shape", {"d": T((8, 4))}),
            ("differ in shape", {1: T((7, 3))}),
            ("in type", {1: T((8, 3), I32)}),
        ),
    ),
    "CONCAT of blocks": Good(
        "CONCAT",
        T((64, 2), Q8_0),
        (T((32, 2), Q8_0), T((32, 2), Q8_0)),
        bad=(("wrong shape", {"d": T((96, 2), Q8_0)}), ("in type", {"d": T((64, 2), Q4_0)})),
    ),
    "CONCAT of long numbers": Good(
        "CONCAT",
        T((8, 2), I64),
        (T((4, 2), I64), T((4, 2), I64)),
        bad=(("not adjacent", {0: T((4, 2), I64, (16, 64, 128, 128))}),),
    ),
    "CONCAT with nothing": Good(
        "CONCAT", T((8, 3)), (T((8, 0)), T((8, 3))), {0: 1}, bad=(("wrong", {"d": T((8, 4))}),)
    ),
    "SET_ROWS with nothing": Good(
        "SET_ROWS",
        T((32, 9), F16),
        (T((32, 0)), T((0,), I64)),
        bad=(("do not match", {1: T((1,), I64)}), ("source differ", {0: T((31, 0))})),
    ),
    "PAD from nothing": Good(
        "PAD", T((8, 4)), (T((8, 0)),), {3: 4}, bad=(("more than once", {"p": {8: 1}}),)
    ),
    "PAD": Good(
        "PAD",
        T((10, 5)),
        (T((8, 4)),),
        {0: 1, 1: 1, 3: 1},
        bad=(
            ("wrong shape", {"p": {0: 2}}),
            ("wrong shape", {"p": {7: 1 << 30}}),
            ("not contiguous", {"d": T((10, 5), nb=(4, 80, 400, 400))}),
            ("not f32", {0: T((8, 4), F16)}),
        ),
    ),
    "PAD around": Good(
        "PAD",
        T((10, 4)),
        (T((8, 4)),),
        {0: 2, 8: 1},
        bad=(("more than once", {"p": {0: 9}, "d": T((17, 4))}),),
    ),
    "PAD_REFLECT_1D": Good(
        "PAD_REFLECT_1D",
        T((13, 2)),
        (T((8, 2)),),
        {0: 2, 1: 3},
        bad=(
            ("as much to reflect", {"p": {0: 9, 1: -4}}),
            ("as much to reflect", {"d": T((18, 2)), "p": {0: 8, 1: 2}}),
            ("rows are wrong", {"d": T((12, 2))}),
        ),
    ),
    "ROLL": Good(
        "ROLL",
        T((8, 4)),
        (T((8, 4)),),
        {0: 3, 1: -1},
        bad=(("roll over", {"p": {0: 8}}), ("roll over", {"p": {1: -(1 << 31)}})),
    ),
    "UPSCALE": Good(
        "UPSCALE",
        T((8, 6)),
        (T((4, 3)),),
        {0: 1},
        bad=(
            ("unknown mode", {"p": {0: 3}}),
            ("unknown mode", {"p": {0: 1 << 9}}),
            ("unknown mode", {"p": {0: 1 << 12}}),
            ("not f32", {"d": T((8, 6), F16)}),
            ("too big to scale", {"d": T(((1 << 22) + 1,), nb=(0, 0, 0, 0))}),
        ),
    ),
    "WIN_PART": Good(
        "WIN_PART",
        T((4, 3, 3, 4)),
        (T((4, 5, 4)),),
        {0: 2, 1: 2, 2: 3},
        bad=(
            ("without size", {"p": {2: 0}}),
            ("wrong shape", {"p": {0: 3}}),
            ("do not cover", {0: T((4, 7, 4))}),
        ),
    ),
    "WIN_UNPART": Good(
        "WIN_UNPART",
        T((4, 5, 4)),
        (T((4, 3, 3, 4)),),
        {0: 3},
        bad=(("without size", {"p": {0: 0}}), ("other windows", {0: T((4, 3, 3, 3))})),
    ),
    "ADD_REL_POS": Good(
        "ADD_REL_POS",
        T((9, 4, 2)),
        (T((9, 4, 2)), T((3, 2, 2, 2)), T((3, 2, 2, 2))),
        bad=(
            ("do not match", {1: T((3, 2, 2, 3)), 2: T((3, 2, 2, 3))}),
            ("differ in shape", {2: T((3, 2, 2, 1))}),
        ),
    ),
    "TIMESTEP_EMBEDDING": Good(
        "TIMESTEP_EMBEDDING",
        T((7, 3)),
        (T((3,)),),
        {0: 7, 1: 10000},
        bad=(
            ("wrong shape", {"p": {0: 100_000}}),
            ("wrong shape", {"d": T((7, 2))}),
            ("not a vector", {0: T((3, 2))}),
        ),
    ),
    # convolutions
    "IM2COL": Good(
        "IM2COL",
        T((2 * 9, 4, 4, 1), F16),
        (T((3, 3, 2, 5), F16), T((6, 6, 2))),
        {**_CONV, 6: 1},
        bad=(
            ("wrong length", {"d": T((9, 4, 4, 1), F16)}),
            ("number of images", {1: T((6, 6, 2, 3))}),
            ("rows are not adjacent", {1: T((6, 6, 2), nb=(4, 64, 384, 768))}),
            ("not contiguous", {"d": T((18, 4, 4), F16, (2, 64, 256, 1024))}),
            ("do not go", {"d": T((18, 4, 4)), 1: T((6, 6, 2), F16)}),
        ),
    ),
    "IM2COL in one dimension": Good(
        "IM2COL",
        T((2 * 3, 4, 2)),
        (T((3, 2)), T((6, 2, 2))),
        _CONV,
        bad=(("wrong length", {1: T((6, 3, 2))}), ("number of images", {"d": T((6, 4, 1))})),
    ),
    "IM2COL_3D": Good(
        "IM2COL_3D",
        T((2 * 8, 3, 3, 3)),
        (T((2, 2, 2, 2)), T((4, 4, 4, 2))),
        {0: 1, 1: 1, 2: 1, 6: 1, 7: 1, 8: 1, 9: 2},
        bad=(
            ("no channels", {"p": {9: 0}}),
            ("do not divide", {"p": {9: 3}}),
            ("rows are wrong", {"d": T((8, 3, 3, 3))}),
        ),
    ),
    "COL2IM_1D": Good(
        "COL2IM_1D",
        T((9, 2)),
        (T((6, 4)),),
        {0: 2, 1: 2, 2: 0},
        bad=(
            ("out of range", {"p": {0: 0}}),
            ("out of range", {"p": {2: -1}}),
            ("do not divide", {"p": {1: 4}}),
            ("wrong shape", {"d": T((9, 1))}),
        ),
    ),
    "CONV_2D": Good(
        "CONV_2D",
        T((4, 4, 5)),
        (T((3, 3, 2, 5)), T((6, 6, 2))),
        _CONV,
        bad=(
            ("differ in channels", {1: T((6, 6, 3))}),
            ("other channels", {"d": T((4, 4, 6))}),
            ("number of images", {"d": T((4, 4, 5, 2))}),
            ("not f32", {1: T((6, 6, 2), F16)}),
            ("too big", {0: T((1 << 11, 1 << 11, 2, 1)), "d": T((4, 4, 1))}),
        ),
    ),
    "CONV_3D": Good(
        "CONV_3D",
        T((3, 3, 3, 3)),
        (T((2, 2, 2, 6)), T((4, 4, 4, 2))),
        {0: 1, 1: 1, 2: 1, 6: 1, 7: 1, 8: 1, 9: 2, 10: 1, 11: 3},
        bad=(
            ("out of range", {"p": {9: 0}}),
            ("kernel has other", {"p": {11: 4}}),
            ("source has other", {"p": {10: 2}}),
            ("result has other", {"d": T((3, 3, 3, 2))}),
        ),
    ),
    "CONV_2D_DW": Good(
        "CONV_2D_DW",
        T((4, 4, 3)),
        (T((3, 3, 1, 3)), T((6, 6, 3))),
        _CONV,
        bad=(
            ("differ in channels", {0: T((3, 3, 1, 2))}),
            ("other channels than the image", {"d": T((4, 4, 2))}),
            ("gaps", {1: T((6, 6, 3), nb=(4, 64, 384, 1152))}),
            ("not one for each", {0: T((3, 3, 2, 3))}),
        ),
    ),
    "CONV_TRANSPOSE_1D": Good(
        "CONV_TRANSPOSE_1D",
        T((9, 2)),
        (T((3, 2, 4), F16), T((4, 4))),
        {0: 2},
        bad=(
            ("wrong shape", {"d": T((8, 2))}),
            ("do not match", {1: T((4, 3))}),
            ("no stride", {"p": {0: -2}}),
        ),
    ),
    "CONV_TRANSPOSE_2D": Good(
        "CONV_TRANSPOSE_2D",
        T((8, 8, 2)),
        (T((2, 2, 2, 3)), T((4, 4, 3))),
        {0: 2},
        bad=(
            ("wrong shape", {"d": T((8, 7, 2))}),
            ("do not match", {1: T((4, 4, 2))}),
            ("no stride", {"p": {0: 0}}),
            ("rows are not", {0: T((2, 2, 2, 3), nb=(4, 16, 32, 64))}),
        ),
    ),
    "POOL_1D": Good(
        "POOL_1D",
        T((4, 3)),
        (T((8, 3)),),
        {0: 1, 1: 2, 2: 2},
        bad=(
            ("unknown kind", {"p": {0: 2}}),
            ("without size", {"p": {2: 0}}),
            ("differ in rows", {"d": T((4, 2))}),
        ),
    ),
    "POOL_2D": Good(
        "POOL_2D",
        T((4, 4, 3)),
        (T((8, 8, 3)),),
        {0: 0, 1: 2, 2: 2, 3: 2, 4: 2},
        bad=(
            ("differ in planes", {"d": T((4, 4, 2))}),
            ("not contiguous", {0: T((8, 8, 3), nb=(4, 32, 4, 768))}),
            ("without size", {"p": {1: -2}}),
        ),
    ),
    # states
    "SSM_CONV": Good(
        "SSM_CONV",
        T((8, 5, 2)),
        (T((8, 8, 2)), T((4, 8))),
        bad=(
            ("wrong shape", {"d": T((8, 6, 2))}),
            ("do not match", {1: T((4, 7))}),
            ("rows are not", {0: T((8, 8, 2), nb=(4, 64, 512, 1024))}),
        ),
    ),
    "SSM_SCAN": Good(
        "SSM_SCAN",
        T((2 * 4 * 3 * 2 + 8 * 2 * 4 * 2,)),
        (
            T((8, 2, 4, 5)),
            T((2, 4, 3, 2)),
            T((4, 3, 2)),
            T((1, 4)),
            T((8, 2, 3, 2)),
            T((8, 2, 3, 2)),
            T((2,), I32, top=5),
        ),
        {0: 1},
        bad=(
            ("wrong size", {"p": {0: 2}}),
            ("cannot be kept", {"p": {0: 0}}),
            ("dt does not match", {2: T((4, 3, 1))}),
            ("A does not match", {3: T((1, 3))}),
            ("B and C", {5: T((8, 2, 3, 1))}),
            ("groups do not", {4: T((8, 3, 3, 2)), 5: T((8, 3, 3, 2))}),
            ("ids do not match", {6: T((1,), I32)}),
            ("not contiguous", {0: T((8, 2, 4, 1), nb=(4, 32, 64, 1 << 20))}),
            ("source 3 is not f32", {3: T((1, 4), F16)}),
        ),
    ),
    "RWKV_WKV6": _attention("RWKV_WKV6", "tttfts", 5),
    "RWKV_WKV7": _attention("RWKV_WKV7", "tttttts", 6),
    "GATED_LINEAR_ATTN": _attention("GATED_LINEAR_ATTN", "tttts", 4),
    "RWKV_WKV6 and its first factors": replace(
        _attention("RWKV_WKV6", "tttfts", 5), bad=(("first factors", {3: T((64, 1))}),)
    ),
    "SOLVE_TRI": Good(
        "SOLVE_TRI",
        T((3, 4, 2)),
        (T((4, 4, 2)), T((3, 4, 2))),
        bad=(
            ("not square", {0: T((3, 4, 2))}),
            ("sides differ", {1: T((3, 4, 1)), "d": T((3, 4, 1))}),
            ("not contiguous", {1: T((3, 4, 2), nb=(4, 16, 64, 128))}),
        ),
    ),
    "GATED_DELTA_NET": Good(
        "GATED_DELTA_NET",
        T((8 * 4, 3 * 2 + 8 * 2)),
        (
            T((8, 2, 3, 2)),
            T((8, 2, 3, 2)),
            T((8, 4, 3, 2)),
            T((1, 4, 3, 2)),
            T((1, 4, 3, 2)),
            T((8, 8, 4, 2)),
        ),
        {0: 1},
        bad=(
            ("no state", {"p": {0: 0}}),
            ("wrong size", {"p": {0: 3}}),
            ("differ in shape", {0: T((4, 2, 3, 2))}),
            ("differ in shape", {1: T((8, 2, 2, 2))}),
            ("over the sequences", {1: T((8, 2, 3, 3))}),
            ("gate has", {3: T((1, 4, 2, 2))}),
            ("beta has", {4: T((8, 4, 3, 2))}),
            ("state has", {5: T((8, 8, 2, 2))}),
        ),
    ),
    "DSV4_HC_COMB": Good(
        "DSV4_HC_COMB",
        T((4, 4, 3)),
        (T((24, 3)), T((3,)), T((24,))),
        {0: 1e-5, 1: 2},
        bad=(
            ("mixes have", {0: T((23, 3))}),
            ("scale has", {1: T((2,))}),
            ("base has", {2: T((23,))}),
            ("no iterations", {"p": {1: 0}}),
        ),
    ),
    "DSV4_HC_PRE": Good(
        "DSV4_HC_PRE",
        T((8, 3)),
        (T((8, 4, 3)), T((4, 3))),
        {0: 1.0},
        bad=(("do not fit", {"p": {1: 1}}), ("wrong shape", {"d": T((8, 2))})),
    ),
    "DSV4_HC_POST": Good(
        "DSV4_HC_POST",
        T((8, 4, 3)),
        (T((8, 3)), T((8, 4, 3)), T((4, 3)), T((4, 4, 3))),
        bad=(
            ("mixes do not", {3: T((4, 4, 2))}),
            ("factors have", {2: T((3, 3))}),
            ("in shape", {0: T((8, 2))}),
        ),
    ),
}
