"""The record of one test: llama-bench's 42 fields, then our own, and the statistics.

`FIELDS` is the one list of names, types and order; the printers in `bench.output` walk it.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter

from caravan.bench.plan import Case
from caravan.bench.usage import Use


@dataclass(frozen=True, slots=True)
class Host:
    """What is the same for all tests of one run: versions and machines.

    Attributes:
        cpu_info: names of this machine's CPUs and accelerators, joined by `, `.
        gpu_info: descriptions of the GPU-type devices; for a worker's device its endpoint.
        local_workers: how many workers this run started itself.
        worker_threads: threads of each worker that this run started and whose name does not say;
            None without any, as those of workers that were started by hand are not known.
        direct_copies: whether workers may copy to each other without passing the head.
        wire_dtype: how activations travel between devices.
    """

    caravan_version: str
    engine_version: str
    engine_commit: str
    engine_api: int
    backends: str = "CPU"
    cpu_info: str = ""
    gpu_info: str = ""
    local_workers: int = 0
    worker_threads: int | None = None
    direct_copies: bool = True
    wire_dtype: str = "f32"

    @property
    def build(self) -> str:
        """What stands where llama-bench has its commit; `engine_api` is the number beside it."""
        return f"caravan {self.caravan_version}, ggml {self.engine_version}"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine says about a loaded model: `size` in bytes, `n_params` weights."""

    description: str
    size: int
    n_params: int


@dataclass(frozen=True, slots=True)
class Result:
    """One test and its samples. `test_time` is UTC, as in RFC 3339.

    `uses` tells how busy each device was; it is None where that was not asked for.
    """

    case: Case
    host: Host
    model: ModelFacts
    test_time: str
    samples_ns: list[int] = field(default_factory=list)
    uses: dict[str, Use | None] | None = None

    @property
    def samples_ts(self) -> list[float]:
        """Tokens per second of each sample, prompt and generation together."""
        tokens = self.case.n_prompt + self.case.n_gen
        return [1e9 * tokens / max(ns, 1) for ns in self.samples_ns]

    @property
    def avg_ns(self) -> int:
        return int(_mean(self.samples_ns))

    @property
    def stddev_ns(self) -> int:
        return int(_deviation(self.samples_ns))

    @property
    def avg_ts(self) -> float:
        return _mean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return _deviation(self.samples_ts)

    @property
    def test_name(self) -> str:
        """`pp512`, `tg128`, `pp512+tg128`, with ` @ d4096` when there were tokens before."""
        prompt, gen = self.case.n_prompt, self.case.n_gen
        parts = [f"pp{prompt}"] if prompt else []
        parts += [f"tg{gen}"] if gen else []
        return "+".join(parts) + (f" @ d{self.case.n_depth}" if self.case.n_depth else "")


def _mean(samples: list[int] | list[float]) -> float:
    return statistics.fmean(samples) if samples else 0.0


def _deviation(samples: list[int] | list[float]) -> float:
    """Of a sample, so with n-1; 0 for a single one."""
    return statistics.stdev(samples) if len(samples) > 1 else 0.0


def devices_text(devices: tuple[str, ...]) -> str:
    return "/".join(devices)


def split_text(shares: tuple[float, ...]) -> str:
    return "/".join(f"{share:.2f}" for share in shares or (0.0,))


def overrides_text(overrides: tuple[tuple[str, str], ...]) -> str:
    return ";".join(f"{pattern}={buffer}" for pattern, buffer in overrides) or "none"


class Kind(enum.Enum):
    """The type of a field."""

    TEXT = "text"
    INTEGER = "integer"
    BOOLEAN = "boolean"
    REAL = "real"


@dataclass(frozen=True, slots=True)
class Field:
    """One column of a record: how it is called, what it holds, where it comes from."""

    name: str
    kind: Kind
    get: Callable[[Result], str | int | float | None]

    def text(self, result: Result) -> str:
        """The value as csv, sql and the table show it; empty for None."""
        value = self.get(result)
        if value is None:
            return ""
        if self.kind is Kind.REAL:
            return f"{value:.6f}"
        return str(value) if self.kind is Kind.TEXT else str(int(value))


def _field(
    name: str, kind: Kind, source: str = "", to_text: Callable[..., str] | None = None
) -> Field:
    """`source` is where the value lies in a `Result`, such as `case.n_batch`."""
    get = attrgetter(source or f"case.{name}")
    if to_text is None:
        return Field(name, kind, get)
    return Field(name, kind, lambda result: to_text(get(result)))


def _own(name: str, kind: Kind) -> Field:
    return _field(name, kind, f"host.{name}")


LLAMA_BENCH_FIELDS = (
    _field("build_commit", Kind.TEXT, "host.build"),
    _field("build_number", Kind.INTEGER, "host.engine_api"),
    _own("cpu_info", Kind.TEXT),
    _own("gpu_info", Kind.TEXT),
    _own("backends", Kind.TEXT),
    _field("model_filename", Kind.TEXT, "case.model"),
    _field("model_type", Kind.TEXT, "model.description"),
    _field("model_size", Kind.INTEGER, "model.size"),
    _field("model_n_params", Kind.INTEGER, "model.n_params"),
    _field("n_batch", Kind.INTEGER),
    _field("n_ubatch", Kind.INTEGER),
    _field("n_threads", Kind.INTEGER),
    _field("cpu_mask", Kind.TEXT),
    _field("cpu_strict", Kind.BOOLEAN),
    _field("poll", Kind.INTEGER),
    _field("type_k", Kind.TEXT),
    _field("type_v", Kind.TEXT),
    _field("n_gpu_layers", Kind.INTEGER),
    _field("n_cpu_moe", Kind.INTEGER),
    _field("split_mode", Kind.TEXT),
    _field("main_gpu", Kind.INTEGER),
    _field("no_kv_offload", Kind.BOOLEAN),
    _field("flash_attn", Kind.INTEGER),
    _field("devices", Kind.TEXT, to_text=devices_text),
    _field("tensor_split", Kind.TEXT, to_text=split_text),
    _field("tensor_buft_overrides", Kind.TEXT, to_text=overrides_text),
    _field("load_mode", Kind.TEXT),
    _field("lazy_mode", Kind.TEXT),
    _field("embeddings", Kind.BOOLEAN),
    _field("no_op_offload", Kind.INTEGER),
    _field("no_host", Kind.BOOLEAN),
    _field("repack", Kind.BOOLEAN),
    _field("fit_target", Kind.INTEGER),
    _field("fit_min_ctx", Kind.INTEGER),
    _field("n_prompt", Kind.INTEGER),
    _field("n_gen", Kind.INTEGER),
    _field("n_depth", Kind.INTEGER),
    _field("test_time", Kind.TEXT, "test_time"),
    _field("avg_ns", Kind.INTEGER, "avg_ns"),
    _field("stddev_ns", Kind.INTEGER, "stddev_ns"),
    _field("avg_ts", Kind.REAL, "avg_ts"),
    _field("stddev_ts", Kind.REAL, "stddev_ts"),
)

OWN_FIELDS = (
    _own("caravan_version", Kind.TEXT),
    _own("engine_version", Kind.TEXT),
    _own("engine_commit", Kind.TEXT),
    _own("local_workers", Kind.INTEGER),
    _own("worker_threads", Kind.INTEGER),
    _own("direct_copies", Kind.BOOLEAN),
    _own("wire_dtype", Kind.TEXT),
)

FIELDS = LLAMA_BENCH_FIELDS + OWN_FIELDS
BY_NAME = {column.name: column for column in FIELDS}
