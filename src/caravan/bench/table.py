"""The markdown table, column by column as llama-bench prints it.

People paste these rows next to rows of llama-bench: headings, widths and the order of the columns
are data here and must not be made prettier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass
from typing import TextIO

from caravan.bench.result import BY_NAME, Host, Kind, Result
from caravan.bench.usage import HEADING, Use, table

_MIB, _GIB = 1 << 20, 1 << 30
_NEVER_GPU = ("CPU", "BLAS", "ZenDNN")


@dataclass(frozen=True, slots=True)
class Column:
    """One column: `width` characters, `left` or right bound."""

    heading: str
    width: int
    left: bool
    text: Callable[[Result], str]

    def cell(self, text: str) -> str:
        return text.ljust(self.width) if self.left else text.rjust(self.width)

    @property
    def rule(self) -> str:
        return "-" * (self.width - 1) + ("-" if self.left else ":")


def size_text(size: int) -> str:
    """Bytes, as `120.00 MiB` or `3.99 GiB`."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB else f"{size / _MIB:.2f} MiB"


def params_text(count: int) -> str:
    """Weights, as `134.52 M` or `7.24 B`."""
    return f"{count / 1e9:.2f} B" if count >= 1_000_000_000 else f"{count / 1e6:.2f} M"


def _rate(result: Result) -> str:
    return f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}"


_FIRST = (
    Column("model", 30, True, lambda result: result.model.description),
    Column("size", 10, False, lambda result: size_text(result.model.size)),
    Column("params", 10, False, lambda result: params_text(result.model.n_params)),
    Column("backend", 10, True, lambda result: result.host.backends),
)
_LAST = (
    Column("test", 15, False, lambda result: result.test_name),
    Column("t/s", 20, False, _rate),
)

# The fields that appear only when they matter, in the order of their columns, with the heading
# (empty: the field's name) and the width (0: what the rule for all others gives).
_OPTIONAL = (
    ("n_gpu_layers", "ngl", 3),
    ("n_cpu_moe", "", 0),
    ("n_threads", "threads", 7),
    ("cpu_mask", "", 0),
    ("cpu_strict", "", 0),
    ("poll", "", 0),
    ("n_batch", "", 7),
    ("n_ubatch", "", 8),
    ("type_k", "", 6),
    ("type_v", "", 6),
    ("main_gpu", "", 0),
    ("split_mode", "sm", 6),
    ("no_kv_offload", "nkvo", 0),
    ("flash_attn", "fa", 3),
    ("devices", "dev", 12),
    ("tensor_split", "ts", 0),
    ("tensor_buft_overrides", "ot", 0),
    ("load_mode", "lm", 10),
    ("lazy_mode", "", 0),
    ("embeddings", "embd", 0),
    ("no_op_offload", "nopo", 4),
    ("no_host", "noh", 4),
    ("repack", "rpk", 3),
    ("fit_target", "fitt", 0),
    ("fit_min_ctx", "fitc", 0),
)
_LEFT = {"devices"}


def _optional_column(name: str, heading: str, width: int) -> Column:
    field = BY_NAME[name]
    # Text of the default width is left bound; the widths that were set by hand are right bound.
    left = name in _LEFT or (not width and field.kind is Kind.TEXT)
    return Column(heading or name, width or max(len(name), 10), left, field.text)


def columns(host: Host, shown: Set[str]) -> list[Column]:
    """The columns of a run: `shown` names the options that differ from their defaults."""
    on_cpu = any(name in host.backends for name in _NEVER_GPU)
    # How many layers go to a GPU always matters with one, and never without.
    wanted = (shown - {"n_gpu_layers"}) | {"n_threads" if on_cpu else "n_gpu_layers"}
    optional = (_optional_column(*row) for row in _OPTIONAL if row[0] in wanted)
    return [*_FIRST, *optional, *_LAST]


class MarkdownPrinter:
    """The printer of the format `md`."""

    def __init__(self, out: TextIO, host: Host, shown: Set[str]) -> None:
        self.out = out
        self.host = host
        self.columns = columns(host, shown)
        self._used: list[tuple[str, float, dict[str, Use | None]]] = []

    def header(self) -> None:
        self._row(column.cell(column.heading) for column in self.columns)
        self._row(column.rule for column in self.columns)

    def result(self, result: Result) -> None:
        self._row(column.cell(column.text(result)) for column in self.columns)
        if result.uses:
            self._used.append((result.test_name, result.avg_ts, result.uses))

    def footer(self) -> None:
        self._print_uses()
        self.out.write(f"\nbuild: {self.host.build} ({self.host.engine_api})\n")
        self.out.flush()

    def abandon(self) -> None:
        """A table that was cut short stays as it is; what was measured is told all the same."""
        self._print_uses()

    def _print_uses(self) -> None:
        if self._used:
            self.out.write("\n".join(("", HEADING, "", *table(self._used))) + "\n")
            self.out.flush()

    def _row(self, cells: Iterable[str]) -> None:
        self.out.write("| " + " | ".join(cells) + " |\n")
        self.out.flush()
