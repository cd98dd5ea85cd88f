"""`Head`: what the options of `head_options` say, checked while nothing is started yet; `opened`
then gives the devices and what a model is loaded with.

Called by the commands that load a model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.download import model_path
from caravan.cli.endpoints import device_list, workers_of
from caravan.cli.loading import shown_loading
from caravan.cli.trace import traced
from caravan.errors import UsageError

if TYPE_CHECKING:
    from caravan.cli.loading import Shown
    from caravan.errors import WorkerLost
    from caravan.llm import ContextParams, Model, ModelParams, SamplingParams
    from caravan.llm.devices import EngineDevice
    from caravan.llm.needs import Needs
    from caravan.llm.opening import Workers
    from caravan.llm.resume import Resume
    from caravan.llm.splitter import Splitter
    from caravan.plan.job import Job


@dataclass(frozen=True, slots=True)
class Opened:
    """What a model is loaded from, on and with.

    Attributes:
        path: the file, which is a model.
        on_load, on_needs: what shows people how it goes; None: nothing is shown.
        resume: what is done about lost workers.
        split: how layers are split where nobody has said it, as `plan.auto.splitter_of` takes it.
        say: tells people in a line what was chosen.
    """

    path: Path
    devices: list[EngineDevice]
    model_params: ModelParams
    fit: bool
    on_load: Shown | None
    on_needs: Callable[[Needs], None] | None
    resume: Resume | bool
    split: str
    say: Callable[[str], None]

    def splitter(self, job: Job) -> Splitter | None:
        """Who splits the model, for such a job; None where nobody would be asked."""
        if len(self.devices) < 2 or any(self.model_params.tensor_split):
            # what plans is imported only to plan
            return None
        from caravan.plan.auto import splitter_of

        return splitter_of(self.split, (job,), self.say)

    def load(self, context: ContextParams, job: Job) -> Model:
        """The model, with room for such a context, split for such a job. Raises what `Model`
        raises."""
        from caravan.llm import Model

        return Model(
            self.path,
            self.model_params,
            devices=self.devices,
            on_load=self.on_load,
            context=context,
            fit=self.fit,
            on_needs=self.on_needs,
            resume=self.resume,
            splitter=self.splitter(job),
        )


@dataclass(frozen=True, slots=True)
class Head:
    """See the module.

    Attributes:
        model: as it was given; nobody has looked for it.
        workers, names: what to open, and which of the devices.
        wait: seconds that a lost worker is waited for; None: a loss is an error.
        quiet: tell nothing but errors.
    """

    model: str
    workers: Workers
    names: list[str]
    model_params: ModelParams
    context_params: ContextParams
    split: str
    fit: bool
    wait: float | None
    trace: Path | None
    verbose: bool
    quiet: bool

    def traced(self) -> AbstractContextManager[None]:
        """To surround all with; see `cli.trace`."""
        return traced(self.trace, [self.model])

    @contextmanager
    def opened(self, end_line: Callable[[], None] = lambda: None) -> Iterator[Opened]:
        """The model's file, fetched if need be, and the devices, until the context is left.

        Args:
            end_line: called before something is told that begins a line.

        Raises what `model_path` and `open_devices` raise.
        """
        path = model_path(self.model)

        from caravan import engine
        from caravan.llm.opening import open_devices

        engine.set_verbose(self.verbose)
        with (
            open_devices(self.workers, self.names) as devices,
            shown_loading(self.quiet) as shown,
        ):
            yield Opened(
                path,
                devices,
                self.model_params,
                self.fit,
                shown,
                None if self.quiet else show_needs,
                self.resume(end_line, shown),
                self.split,
                self.teller(end_line, shown),
            )

    def teller(self, end_line: Callable[[], None], shown: Shown | None) -> Callable[[str], None]:
        """Tells a line, below bars that broke off; does nothing where all is to be quiet."""

        def say(line: str) -> None:
            if self.quiet:
                return
            end_line()
            if shown is not None:
                shown.end()
            tell(line)

        return say

    def resume(self, end_line: Callable[[], None], shown: Shown | None) -> Resume | bool:
        """What is done about lost workers; each is told in a line."""
        from caravan.llm.resume import Resume

        if self.wait is None:
            return False
        if self.quiet:
            return Resume(self.wait)
        say = self.teller(end_line, shown)

        def told(resumed: object) -> None:
            say(str(resumed))

        def waiting(lost: WorkerLost, seconds: float) -> None:
            say(f"{lost}; waiting for it, {seconds:g} s at most")

        return Resume(self.wait, on_resume=told, on_wait=waiting)


def head_of(options: dict[str, Any]) -> Head:
    """What all groups of options but the sampling say. Raises UsageError."""
    names = device_list(options["device"])
    workers = workers_of(options, wire_dtype=options["wire_dtype"], poll=options["poll"])

    from caravan.llm import ModelParams

    model_params = ModelParams(
        n_gpu_layers=options["n_gpu_layers"],
        tensor_split=_shares(options["tensor_split"]),
        repack=not options["no_repack"],
    )
    return Head(
        options["model"],
        workers,
        names,
        model_params,
        context_of(options),
        split=options["split"],
        fit=options["fit"] == "on",
        wait=options["resume_wait"] if options["resume"] else None,
        trace=options["trace"],
        verbose=options["verbose"],
        quiet=options["quiet"],
    )


def context_of(options: dict[str, Any]) -> ContextParams:
    """What `compute_options` say of contexts. Raises UsageError."""
    from caravan.llm import ContextParams

    return ContextParams(
        n_ctx=options["ctx_size"],
        n_batch=options["batch_size"],
        n_ubatch=options["ubatch_size"],
        n_threads=options["threads"],
        type_k=options["cache_type_k"],
        type_v=options["cache_type_v"],
        flash_attn=options["flash_attn"],
    )


def sampling_of(options: dict[str, Any]) -> SamplingParams:
    """What the options for sampling say. Raises UsageError."""
    from caravan.llm import SamplingParams

    return SamplingParams(
        temp=options["temp"],
        top_k=options["top_k"],
        top_p=options["top_p"],
        min_p=options["min_p"],
        repeat_penalty=options["repeat_penalty"],
        seed=None if options["seed"] == -1 else options["seed"],
    )


def tell(line: str) -> None:
    """On stderr, with the program's name before it."""
    click.echo(f"caravan: {line}", err=True)


def show_needs(needs: Needs) -> None:
    """A line for each device, before anything is sent to it."""
    for device in needs.devices:
        tell(str(device))
    if not needs.pipeline:
        tell(
            "note: no room for several batches at a time: prompts take the devices in turns (a"
            " smaller -c or -ub makes room)"
        )


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _split(text.replace(",", "/"), "/"))
    except ValueError:
        raise UsageError(f"--tensor-split {text!r}: expected numbers joined by '/'") from None
