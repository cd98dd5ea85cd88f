"""The tests that a grid of options means, one `Case` each, in llama-bench's order.

Pure: values in, values out. The order keeps the cases of one model together, so that a model is
loaded again only when `same_model` says that it must be.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

from caravan.bench.options import Grid
from caravan.plan.job import Job


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that one test needs to know. The field order is the order of the runs: the values
    of an earlier field change less often than those of a later one.

    Attributes:
        flash_attn: 1 on, 0 off, -1 the engine decides.
        devices: device names, or `values.AUTO`, or `values.NO_DEVICE`.
        tensor_split: share of each device; empty means by free memory.
    """

    model: str
    fit_target: int
    fit_min_ctx: int
    n_gpu_layers: int
    n_cpu_moe: int
    split_mode: str
    load_mode: str
    lazy_mode: str
    main_gpu: int
    devices: tuple[str, ...]
    tensor_split: tuple[float, ...]
    tensor_buft_overrides: tuple[tuple[str, str], ...]
    no_host: bool
    repack: bool
    embeddings: bool
    no_op_offload: bool
    n_batch: int
    n_ubatch: int
    type_k: str
    type_v: str
    no_kv_offload: bool
    flash_attn: int
    n_threads: int
    cpu_mask: str
    cpu_strict: bool
    n_depth: int
    poll: int
    n_prompt: int
    n_gen: int

    @property
    def n_ctx(self) -> int:
        """The context is as large as the test needs, and no larger."""
        return self.n_prompt + self.n_gen + self.n_depth


_WORK = ("n_prompt", "n_gen")
_ORDER = tuple(field.name for field in fields(Case) if field.name not in _WORK)
_model_level = attrgetter(*_ORDER[: _ORDER.index("embeddings")])


def cases(grid: Grid) -> list[Case]:
    """Every combination; within each, all prompts, then all generations, then all pairs."""
    work = tuple(_work(grid))
    return [
        Case(**dict(zip(_ORDER, combination, strict=True)), n_prompt=n_prompt, n_gen=n_gen)
        for combination in itertools.product(*(grid[name] for name in _ORDER))
        for n_prompt, n_gen in work
    ]


def _work(grid: Grid) -> Iterator[tuple[int, int]]:
    yield from ((n, 0) for n in grid["n_prompt"] if n)
    yield from ((0, n) for n in grid["n_gen"] if n)
    yield from ((pp, tg) for pp, tg in grid["n_pg"] if pp or tg)


def jobs(grid: Grid) -> list[Job]:
    """What a model is wanted for in these tests."""
    return [Job(n_prompt, n_gen) for n_prompt, n_gen in _work(grid)]


def same_model(a: Case, b: Case) -> bool:
    """Whether both run on one loaded model."""
    return bool(_model_level(a) == _model_level(b))
