"""A whole run: devices, models, tests, output. What the command line calls.

The order matters: what can be refused is refused before anything is started or printed, and what
was started is ended whatever happens. The rig (workers, devices, engine) is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TextIO

from caravan.bench.devices import Inventory
from caravan.bench.options import Grid, shown_columns
from caravan.bench.output import Printer, make_printer
from caravan.bench.plan import Case, cases
from caravan.bench.process import set_cpu_mask, set_priority
from caravan.bench.result import Host, Result, split_text
from caravan.bench.run import BenchModel, Runner, RunSettings
from caravan.bench.usage import Totals
from caravan.errors import UsageError
from caravan.llm.cores import share_of_cores
from caravan.llm.splitter import Splitter
from caravan.transport.certificates import Tls
from caravan.trust.token import Token


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that has one value for the whole run.

    Attributes:
        endpoints: the workers to use; with `local_workers` there are none.
        local_workers: how many workers to start on this machine.
        local_devices: devices of this machine that need a worker, such as `local:CPU:1`.
        worker_threads: threads of each started worker that names none; None without any.
        direct_copies: whether workers may copy to each other without passing the head.
        wire_dtype: how activations travel between devices: f32, f16 or bf16.
        timeout: bound in seconds on every wait for a worker.
        priority: -1 to 3, as in llama-bench.
        math_cores: the default number of threads.
        utilization: whether to find out how busy each device was.
        fit: whether to refuse what does not fit before it is loaded.
        splitter: who decides how layers are split where no test says it; None: by free memory.
        token: what workers that ask for one are shown; None: the environment's.
        tls: for the endpoints.
    """

    run: RunSettings = field(default_factory=RunSettings)
    output: str = "md"
    output_err: str = "none"
    progress: bool = False
    verbose: bool = False
    endpoints: tuple[str, ...] = ()
    local_workers: int = 0
    local_devices: tuple[str, ...] = ()
    worker_threads: int | None = None
    direct_copies: bool = True
    wire_dtype: str = "f32"
    timeout: float = 30.0
    priority: int = 0
    math_cores: int = 1
    utilization: bool = False
    fit: bool = True
    splitter: Splitter | None = None
    token: Token | None = None
    tls: Tls | None = None


def threads_of_workers(workers: int, threads: Sequence[int], cores: int) -> int | None:
    """The threads of each started worker that names none: those asked for, or a share of the cores.

    None without such workers. Raises UsageError for several values, since the workers are started
    once.
    """
    if not workers:
        return None
    if len(threads) > 1:
        raise UsageError("--local-workers and local:CPU take one value of --threads")
    return threads[0] if threads else share_of_cores(cores, workers)


class Rig(Protocol):
    """The open devices of a run, and the way to load a model onto them."""

    @property
    def inventory(self) -> Inventory: ...
    @property
    def host(self) -> Host: ...
    def load(self, case: Case) -> BenchModel: ...
    def totals(self, case: Case) -> Totals:
        """What each device of the case has done so far; asks the workers and waits."""


OpenRig = Callable[[Settings], AbstractContextManager[Rig]]


def bench(
    grid: Grid,
    settings: Settings,
    open_rig: OpenRig,
    find_model: Callable[[str], Path],
    *,
    out: TextIO,
    err: TextIO,
) -> None:
    """Run all tests of `grid`, printing each to `out` (and `err`) as it is done.

    Raises CaravanError, after the tests that were done are printed. Blocks.
    """
    found = {name: str(find_model(name)) for name in grid["model"]}
    grid = {**grid, "model": tuple(found[name] for name in grid["model"])}
    set_priority(settings.priority)
    with open_rig(settings) as rig:
        _check_split(grid, max(len(rig.inventory.pick(names)) for names in grid["devices"]))
        # After the workers were started: it is this process that is to be bound, not they.
        set_cpu_mask(grid["cpu_mask"][0])
        shown = shown_columns(grid, settings.math_cores)
        targets = ((settings.output, out), (settings.output_err, err))
        made = (make_printer(name, stream, rig.host, shown) for name, stream in targets)
        with _printing([printer for printer in made if printer]) as output:
            _run_all(cases(grid), settings, rig, output, err)


def _check_split(grid: Grid, n_devices: int) -> None:
    """One split may serve several sets of devices, so that it may be too long for some of them."""
    for shares in grid["tensor_split"]:
        if len(shares) > n_devices:
            raise UsageError(
                f"--tensor-split {split_text(shares)} has more shares than devices ({n_devices})"
            )


def list_devices(settings: Settings, open_rig: OpenRig, *, out: TextIO) -> None:
    """Print the devices that `--device` may name."""
    with open_rig(settings) as rig:
        out.write(rig.inventory.listing())


def _run_all(
    tests: Sequence[Case], settings: Settings, rig: Rig, output: _Output, err: TextIO
) -> None:
    def say(text: str) -> None:
        # People look for llama-bench's own words.
        print(f"llama-bench: {text}", file=err, flush=True)

    runner = Runner(
        rig.load,
        rig.host,
        settings.run,
        say=say if settings.progress else lambda text: None,
        ready=output.begin,
        watch=rig.totals if settings.utilization else None,
    )
    with closing(runner):
        for number, case in enumerate(tests, 1):
            output.result(runner.run(case, f"benchmark {number}/{len(tests)}"))


class _Output:
    """All printers of a run. The headings wait for the first test that can run: a model that
    cannot be loaded leaves no empty table behind."""

    def __init__(self, printers: Sequence[Printer]) -> None:
        self.printers = printers
        self.begun = False

    def begin(self) -> None:
        """Print the headings, unless they are there already."""
        if not self.begun:
            self.begun = True
            for printer in self.printers:
                printer.header()

    def result(self, result: Result) -> None:
        for printer in self.printers:
            printer.result(result)


@contextmanager
def _printing(printers: Sequence[Printer]) -> Iterator[_Output]:
    output = _Output(printers)
    try:
        yield output
    except BaseException:
        if output.begun:
            for printer in printers:
                printer.abandon()
        raise
    output.begin()  # a run without a test has a table too
    for printer in printers:
        printer.footer()
