"""A model, a context, devices and a rig without an engine, for the tests of the bench."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from caravan.bench.devices import Inventory
from caravan.bench.options import defaults, read_grid
from caravan.bench.plan import Case, cases
from caravan.bench.result import Host, ModelFacts, Result
from caravan.bench.session import Settings
from caravan.bench.usage import Totals
from caravan.errors import CaravanError

CORES = 4
FACTS = ModelFacts("llama ?B Q4_1", 98_000_000, 134_515_008)
HOST = Host("0.1.0", "0.26.0", "abc123", 3, backends="CPU", cpu_info="Some CPU")


def grid_of(**given: str) -> dict[str, tuple[object, ...]]:
    """The grid of options given by field name, each with one text."""
    return read_grid({name: [text] for name, text in given.items()}, CORES)


def case_of(**changes: Any) -> Case:
    """The default case with some fields changed; a prompt of 8 unless said otherwise."""
    values: dict[str, Any] = {name: found[0] for name, found in defaults(CORES).items() if found}
    del values["n_gen"]
    return Case(**{**values, "n_prompt": 8, "n_gen": 0, "model": "m.gguf", **changes})


def result_of(
    samples_ns: Sequence[int] = (1_000_000_000,), host: Host = HOST, **changes: Any
) -> Result:
    return Result(case_of(**changes), host, FACTS, "2026-11-29T12:00:00Z", list(samples_ns))


def all_cases(**given: str) -> list[Case]:
    return cases(grid_of(**given))


@dataclass
class FakeDevice:
    """An engine device that only has a name."""

    name: str
    description: str
    endpoint: str = ""
    handle: int = 0
    allocation_error: CaravanError | None = None

    def memory(self) -> tuple[int, int]:
        return 3 << 20, (7 << 20) + 5

    def check(self) -> None:
        pass


class FakeClock:
    """Nanoseconds that pass only when a fake context computes."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> int:
        return self.now


@dataclass
class FakeContext:
    """Writes down what is asked of it; a token takes a millisecond."""

    log: list[str]
    clock: FakeClock
    fits: bool = True
    decoded: list[list[int]] = field(default_factory=list)
    on_decode: Callable[[], None] = lambda: None

    def decode(self, tokens: Sequence[int]) -> None:
        self.on_decode()
        self.decoded.append(list(tokens))
        self.log.append(f"decode {len(tokens)}")
        self.clock.now += 1_000_000 * len(tokens)

    def synchronize(self) -> None:
        self.log.append("synchronize")

    def clear(self) -> None:
        self.log.append("clear")

    def save(self) -> bytes:
        self.log.append("save")
        return b"state"

    def restore(self, state: bytes) -> bool:
        self.log.append("restore")
        return self.fits

    def close(self) -> None:
        self.log.append("close context")


@dataclass
class FakeModel:
    """A model whose contexts share one log."""

    log: list[str]
    clock: FakeClock
    bos: int | None = 1
    n_vocab: int = 100
    fits: bool = True
    facts: ModelFacts = FACTS
    contexts: list[FakeContext] = field(default_factory=list)
    on_decode: Callable[[], None] = lambda: None

    def context(self, case: Case) -> FakeContext:
        self.log.append(f"context {case.n_ctx}")
        made = FakeContext(self.log, self.clock, self.fits, on_decode=self.on_decode)
        self.contexts.append(made)
        return made

    def close(self) -> None:
        self.log.append("close model")


@dataclass
class FakeRig:
    """Devices RPC0 and RPC1 and a loader of fake models."""

    log: list[str] = field(default_factory=list)
    inventory: Inventory = field(
        default_factory=lambda: Inventory(
            remote=(FakeDevice("RPC0", "Some CPU", "a:1"), FakeDevice("RPC1", "Other CPU", "b:2"))
        )
    )
    host: Host = HOST
    on_decode: Callable[[], None] = lambda: None
    clock: FakeClock = field(default_factory=FakeClock)
    settings: Settings | None = None

    def load(self, case: Case) -> FakeModel:
        self.log.append(f"load {case.model} {'/'.join(case.devices)}")
        return FakeModel(self.log, self.clock, on_decode=self.on_decode)

    def totals(self, case: Case) -> Totals:
        raise AssertionError("nobody asked how busy the devices are")

    @contextmanager
    def open(self, settings: Settings, show_load: object = None) -> Iterator[FakeRig]:
        self.settings = settings
        self.log.append("open")
        try:
            yield self
        finally:
            self.log.append("close")
