"""`caravan plan`: what a model would do on which devices, before any of it is loaded."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.download import model_path
from caravan.cli.endpoints import device_list, workers_of
from caravan.cli.head import context_of, tell
from caravan.cli.head_options import compute_options, model_option, reach_options
from caravan.cli.main import dashed
from caravan.errors import UsageError

if TYPE_CHECKING:
    from caravan.backend import RemoteDevice
    from caravan.llm import ContextParams, ModelParams
    from caravan.plan.job import Job
    from caravan.plan.options import Plan
    from caravan.plan.pipeline import Setting
    from caravan.plan.verify import Check
    from caravan.plan.work import ModelWork

_NUMBER = re.compile(r"[0-9]{1,20}")
_ALONE = ("rpc", "local_workers", "device")  # what a described cluster does without


class Numbers(click.types.StringParamType):
    """Several whole numbers from 1 on, joined by commas."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, tuple):
            return value
        parts = [part.strip() for part in str(value).split(",")]
        if not all(_NUMBER.fullmatch(part) and 0 < int(part) < 1 << 31 for part in parts):
            self.fail(f"{value!r} is no list of numbers such as 512,4096", param, ctx)
        return tuple(dict.fromkeys(int(part) for part in parts))


@click.command(
    "plan",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@model_option
@click.option(
    "--cluster",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Plan for devices that are described in this file, and need not exist.",
)
@click.option(
    "-p",
    "--prompt",
    "prompts",
    type=Numbers(),
    default="512,4096",
    show_default=True,
    metavar="N,…",
    help="Tokens of a prompt.",
)
@click.option(
    "--concurrency",
    type=Numbers(),
    default="1",
    show_default=True,
    metavar="N,…",
    help="Requests at the same time.",
)
@click.option(
    "-n",
    "--predict",
    type=click.IntRange(1),
    default=128,
    show_default=True,
    metavar="N",
    help="Tokens of an answer.",
)
@compute_options("Context size of a request; 0: what prompt and answer need.", planned=True)
@reach_options
@click.option(
    "--top",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    metavar="N",
    help="Show so many of the best choices.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object, with everything.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Draw speed-up over prompt length, and the best pipeline: .png or .svg.",
)
@click.option("--verify", is_flag=True, help="Run what is predicted, and tell how far off it is.")
@click.option("--fresh", is_flag=True, help="Measure again what is known of the devices.")
@click.option("-v", "--verbose", is_flag=True, help="The engine's log on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
def command(**options: Any) -> int:
    """Predict how fast a model is on which devices, and how it is best split.

    Nothing is loaded: times of the model's layers and of the links are measured, or computed from a
    description, and what the devices do together is simulated. The exit code is 1 if nothing fits.
    """
    wish = wish_of(options)
    if options["plot"] is not None:
        _require_plot(options["plot"])
    path = model_path(options["model"])

    from caravan import engine

    engine.set_verbose(options["verbose"])
    from caravan.plan.steps import Steps

    say = (lambda line: None) if options["quiet"] else tell
    with Steps(say) as step, _found(options, path, wish, step) as (setting, work, devices):
        plan = _planned(path, wish, setting)
        rows = _verified(path, wish, plan, devices, step) if options["verify"] else None
    if options["plot"] is not None and plan.best is not None:
        from caravan.plan.picture import draw

        draw(plan, options["plot"], max(wish.prompts), model=path.stem)
    if options["as_json"]:
        from caravan.cli.plan_record import record

        text = json.dumps(record(path, wish.context, plan, work, devices, rows), indent=2)
        click.echo(text)
    else:
        _print(path, wish, plan, rows, options["top"])
    return 0 if plan.best is not None else 1


@dataclass(frozen=True, slots=True)
class Wish:
    """What is planned for.

    Attributes:
        context: of one request.
    """

    prompts: tuple[int, ...]
    concurrency: tuple[int, ...]
    generate: int
    model: ModelParams
    context: ContextParams

    @property
    def jobs(self) -> list[Job]:
        from caravan.plan.job import Job

        return [Job(n, self.generate, c) for n in self.prompts for c in self.concurrency]

    @property
    def all_contexts(self) -> ContextParams:
        """Of all requests that are there at a time."""
        most = max(self.concurrency)
        return replace(self.context, n_ctx=self.context.n_ctx * most, n_seq_max=most)

    def work(self, path: Path) -> ModelWork:
        """What a model computes for it. Raises UsageError where that is more than the model
        knows."""
        from caravan.plan.setting import work_of

        found = work_of(path, self.model, self.context, self.jobs, exact=True)
        longest = max(self.prompts) + self.generate
        if 0 < found.n_positions < longest:
            raise UsageError(
                f"{path.name} was made for {found.n_positions} tokens: a prompt of"
                f" {max(self.prompts)} and {self.generate} more do not fit (-p, -n)"
            )
        return found


def wish_of(options: dict[str, Any]) -> Wish:
    """What the options say, checked. Raises UsageError."""
    from caravan.llm import ModelParams
    from caravan.llm.params import whole_blocks

    if options["cluster"] is not None:
        if any(options[name] for name in _ALONE):
            raise UsageError("--cluster describes all devices: no --rpc, --local-workers or -dev")
        if options["verify"]:
            raise UsageError("--verify needs devices that are there, and --cluster describes some")
    context = context_of(options)
    longest = max(options["prompts"]) + options["predict"]
    n_ctx = context.n_ctx or whole_blocks(longest)
    if n_ctx < longest:
        raise UsageError(
            f"a prompt of {max(options['prompts'])} tokens and {options['predict']} more do not fit"
            f" into a context of {n_ctx} (-c)"
        )
    return Wish(
        options["prompts"],
        options["concurrency"],
        options["predict"],
        ModelParams(repack=not options["no_repack"]),
        replace(context, n_ctx=n_ctx),
    )


def _require_plot(path: Path) -> None:
    """Raises UsageError where nothing could be drawn there."""
    from caravan.plan.picture import check_path

    check_path(path)
    if find_spec("matplotlib") is None:
        raise UsageError("--plot needs matplotlib: pip install matplotlib")


@contextmanager
def _found(
    options: dict[str, Any], path: Path, wish: Wish, step: Callable[[str], None]
) -> Iterator[tuple[Setting, ModelWork, list[RemoteDevice]]]:
    """What is known of the devices; those that are there, until the context is left."""
    from caravan.plan.setting import described, measured

    if options["cluster"] is not None:
        from caravan.plan.cluster import read_cluster

        cluster = read_cluster(options["cluster"])
        work = wish.work(path)
        yield described(work, wish.context, cluster), work, []
        return
    names = device_list(options["device"])
    workers = workers_of(options)

    from caravan.llm.opening import open_devices

    with open_devices(workers, names) as opened:
        devices = _measurable(opened)
        work = wish.work(path)
        setting = measured(work, wish.context, devices, step, fresh=options["fresh"])
        yield setting, work, devices


def _measurable(opened: Sequence[Any]) -> list[RemoteDevice]:
    """Those of workers; of others a note."""
    from caravan.backend import RemoteDevice

    devices = [device for device in opened if isinstance(device, RemoteDevice)]
    for device in opened:
        if not isinstance(device, RemoteDevice):
            tell(f"note: {device.name} is left out: local:{device.name} can be measured")
    if not devices:
        raise UsageError("no devices to plan for: use --rpc, --local-workers, -dev or --cluster")
    return devices


def _planned(path: Path, wish: Wish, setting: Setting) -> Plan:
    from caravan.plan.memory import MemoryModel
    from caravan.plan.planner import make_plan

    return make_plan(
        setting,
        MemoryModel.of(path, wish.model, wish.all_contexts),
        prompts=wish.prompts,
        concurrency=wish.concurrency,
        generate=wish.generate,
    )


def _verified(
    path: Path,
    wish: Wish,
    plan: Plan,
    devices: Sequence[RemoteDevice],
    step: Callable[[str], None],
) -> list[Check]:
    from caravan.plan.verify import verify

    if plan.best is None:
        return []
    return verify(path, wish.model, wish.context, plan, devices, prompts=wish.prompts, say=step)


def _print(path: Path, wish: Wish, plan: Plan, rows: Sequence[Check] | None, top: int) -> None:
    from caravan.cli.plan_table import checked, told

    width = shutil.get_terminal_size().columns
    requests = max(wish.concurrency)
    each = f" for each of {requests} requests" if requests > 1 else ""
    about = (
        f"{path.name}: {plan.setting.n_layer} layers and the output, a context of"
        f" {wish.context.n_ctx} tokens{each}"
    )
    lines = [*textwrap.wrap(about, width), "", *told(plan, top, width)]
    if rows:
        lines += ["", *checked(rows)]
    click.echo("\n".join(lines))
