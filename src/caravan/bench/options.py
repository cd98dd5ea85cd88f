"""The test options: one row each, with names, reader, default, and what works so far.

`cli/bench.py` makes its command line from this table, `read_grid` turns what was given into lists
of values, and `shown_columns` tells a table what to show. The order of the rows is the help's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from caravan.bench import values as read
from caravan.errors import UsageError

Value: TypeAlias = Any
"""A value of one of the types that `plan.Case` gives to its fields."""

Grid: TypeAlias = dict[str, tuple[Value, ...]]
"""For every test option, by its field's name, all the values to be run."""


@dataclass(frozen=True, slots=True)
class TestOption:
    """One test option.

    Attributes:
        field: the name in `Case`, in the records, and of the click parameter.
        default: the values when the option is not given; empty where the caller must fill them in.
        working: the values that can be run today; empty means all that `reader` lets pass.
        shown: how the help writes the default, when it is not the plain value.
        replaces: a repeated option replaces what came before instead of adding to it.
    """

    __test__ = False  # pytest would take the name for a test class

    field: str
    flags: tuple[str, ...]
    metavar: str
    reader: read.Reader[Value]
    default: tuple[Value, ...]
    help: str
    working: tuple[Value, ...] = ()
    shown: str = ""
    replaces: bool = False

    @property
    def default_text(self) -> str:
        """The default as the help shows it."""
        return self.shown or ",".join(str(value) for value in self.default)


_BIT = "<0|1>"
_CACHE_TYPES = ("f16", "bf16", "q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl")
_CACHE_TYPE = read.words(*_CACHE_TYPES)
_FLASH = {
    "on": 1, "off": 0, "auto": -1, "enabled": 1, "true": 1, "1": 1, "disabled": 0, "false": 0,
    "0": 0, "-1": -1,
}  # fmt: skip

OPTIONS = (
    TestOption(
        "model",
        ("-m", "--model"),
        "<filename>",
        read.texts,
        ("models/7B/ggml-model-q4_0.gguf",),
        "model file, or the name of a sample (smollm2)",
    ),
    TestOption("n_prompt", ("-p", "--n-prompt"), "<n>", read.integers(), (512,), "prompt tokens"),
    TestOption("n_gen", ("-n", "--n-gen"), "<n>", read.integers(), (128,), "generated tokens"),
    TestOption(
        "n_pg",
        ("-pg",),
        "<pp,tg>",
        read.pair,
        (),
        "prompt and generation in one test",
        shown="none",
    ),
    TestOption("n_depth", ("-d", "--n-depth"), "<n>", read.integers(), (0,), "tokens there before"),
    TestOption(
        "n_batch",
        ("-b", "--batch-size"),
        "<n>",
        read.integers(1),
        (2048,),
        help="tokens handed over at a time",
    ),
    TestOption(
        "n_ubatch",
        ("-ub", "--ubatch-size"),
        "<n>",
        read.integers(1),
        (512,),
        help="tokens computed at a time, a stage of the pipeline",
    ),
    TestOption(
        "type_k",
        ("-ctk", "--cache-type-k"),
        "<t>",
        _CACHE_TYPE,
        ("f16",),
        help="type of the K cache: f16, bf16, q8_0, q4_0, ...",
    ),
    TestOption(
        "type_v",
        ("-ctv", "--cache-type-v"),
        "<t>",
        _CACHE_TYPE,
        ("f16",),
        help="type of the V cache",
    ),
    TestOption(
        "n_threads",
        ("-t", "--threads"),
        "<n>",
        read.integers(1, read.MAX_THREADS),
        (),
        shown="math cores",
        help="CPU threads",
    ),
    TestOption(
        "cpu_mask",
        ("-C", "--cpu-mask"),
        "<hex>",
        read.masks,
        ("0x0",),
        "CPUs for this process; one mask only",
    ),
    TestOption(
        "cpu_strict",
        ("--cpu-strict",),
        _BIT,
        read.booleans,
        (False,),
        working=(False,),
        shown="0",
        help="one thread to a CPU; only 0 yet",
    ),
    TestOption(
        "poll",
        ("--poll",),
        "<0...100>",
        read.integers(0, 100),
        (50,),
        help="how long to look for an answer of a worker before sleeping",
    ),
    TestOption(
        "n_gpu_layers",
        ("-ngl", "--n-gpu-layers"),
        "<n>",
        read.integers(-1),
        (-1,),
        help="layers on the devices; -1: all",
    ),
    TestOption(
        "n_cpu_moe",
        ("-ncmoe", "--n-cpu-moe"),
        "<n>",
        read.integers(),
        (0,),
        help="layers whose experts stay on the CPU",
    ),
    TestOption(
        "split_mode",
        ("-sm", "--split-mode"),
        "<none|layer|row|tensor>",
        read.words("none", "layer", "row", "tensor"),
        ("layer",),
        working=("none", "layer"),
        help="row and tensor not yet",
    ),
    TestOption(
        "main_gpu",
        ("-mg", "--main-gpu"),
        "<i>",
        read.integers(),
        (0,),
        replaces=True,
        help="the device of split mode none",
    ),
    TestOption(
        "no_kv_offload",
        ("-nkvo", "--no-kv-offload"),
        _BIT,
        read.booleans,
        (False,),
        shown="0",
        help="keep the KV cache on the CPU",
    ),
    TestOption(
        "flash_attn",
        ("-fa", "--flash-attn"),
        "<on|off|auto>",
        read.names(_FLASH),
        (-1,),
        shown="auto",
        help="flash attention; auto: where the devices can",
    ),
    TestOption(
        "devices",
        ("-dev", "--device"),
        "<dev0/dev1/...>",
        read.device_sets,
        (read.AUTO,),
        shown="auto",
        help="',' starts another configuration; local:CPU:1 is a worker with one thread on this"
        " machine, started for the run",
    ),
    TestOption(
        "load_mode",
        ("-lm", "--load-mode"),
        "<auto|none|mmap|mlock|mmap+mlock|dio>",
        read.words("auto", "none", "mmap", "mlock", "mmap+mlock", "dio"),
        ("auto",),
        help="how the file is read",
    ),
    TestOption(
        "lazy_mode",
        ("-lzm", "--lazy-mode"),
        "<on|auto|off>",
        read.words("on", "auto", "off"),
        ("auto",),
        help="read marked tensors row by row",
    ),
    TestOption(
        "embeddings",
        ("-embd", "--embeddings"),
        _BIT,
        read.booleans,
        (False,),
        shown="0",
        help="compute embeddings",
    ),
    TestOption(
        "tensor_split",
        ("-ts", "--tensor-split"),
        "<ts0/ts1/...>",
        read.ratios,
        ((),),
        "shares of the devices",
        shown="0",
    ),
    TestOption(
        "tensor_buft_overrides",
        ("-ot", "--override-tensor"),
        "<pattern=buffer;...>",
        read.overrides,
        ((),),
        shown="disabled",
        help="where tensors go",
    ),
    TestOption(
        "no_op_offload",
        ("-nopo", "--no-op-offload"),
        _BIT,
        read.booleans,
        (False,),
        shown="0",
        help="operations on the host's weights stay on the CPU",
    ),
    TestOption(
        "no_host", ("--no-host",), _BIT, read.booleans, (False,), shown="0", help="no host buffers"
    ),
    TestOption(
        "repack",
        ("--repack",),
        _BIT,
        read.booleans,
        (True,),
        shown="1",
        help="repack weights for the CPU",
    ),
    TestOption(
        "fit_target",
        ("-fitt", "--fit-target"),
        "<MiB>",
        read.integers(),
        (0,),
        working=(0,),
        shown="off",
        help="not yet",
    ),
    TestOption(
        "fit_min_ctx",
        ("-fitc", "--fit-ctx"),
        "<n>",
        read.integers(),
        (0,),
        working=(0,),
        help="not yet",
    ),
)

BY_FIELD = {option.field: option for option in OPTIONS}


def defaults(math_cores: int) -> Grid:
    """The grid that runs when no test option is given."""
    grid = {option.field: option.default for option in OPTIONS}
    grid["n_threads"] = (math_cores,)
    return grid


def read_grid(given: Mapping[str, Sequence[str]], math_cores: int) -> Grid:
    """All values of all test options, from the texts given for some of them.

    Raises UsageError, naming the option, for text without meaning and for what cannot be run yet.
    """
    grid = defaults(math_cores)
    for field, texts in given.items():
        if texts:
            grid[field] = _read_option(BY_FIELD[field], texts)
    if len(grid["cpu_mask"]) > 1:
        raise UsageError("--cpu-mask takes one mask; several are not supported yet")
    return grid


def _read_option(option: TestOption, texts: Sequence[str]) -> tuple[Value, ...]:
    name = option.flags[-1]
    found: list[Value] = []
    for text in texts[-1:] if option.replaces else texts:
        try:
            found += option.reader(text)
        except UsageError as exc:
            raise UsageError(f"{name}: {exc}") from None
        _refuse_not_yet(option, name, text, found)
    return tuple(found)


def _refuse_not_yet(option: TestOption, name: str, text: str, found: Sequence[Value]) -> None:
    if option.working and not set(found) <= set(option.working):
        # False and True are written as they are typed.
        words = (str(int(v)) if isinstance(v, bool) else str(v) for v in option.working)
        raise UsageError(f"{name} {text} is not supported yet; what works: {' and '.join(words)}")


def shown_columns(grid: Grid, math_cores: int) -> set[str]:
    """The options that a table must show: those with several values, or not their default."""
    standard = defaults(math_cores)
    return {field for field, found in grid.items() if found != standard[field]}
