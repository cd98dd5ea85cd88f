"""`caravan bench`: the command line of the work-alike of llama-bench.

Options only: the test options come from `bench.options`, the work is `bench.session`'s. Unlike
click's usual options, `-pg`, `-ub`, `-rpc` and the like have one dash, as in llama-bench.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from caravan.bench.options import OPTIONS
from caravan.cli.download import model_path
from caravan.cli.endpoints import endpoints
from caravan.cli.head import tell
from caravan.cli.head_options import split_option
from caravan.cli.loading import shown_loading
from caravan.cli.main import dashed, print_version
from caravan.cli.seconds import Seconds
from caravan.cli.tls_options import of_head, tls_options
from caravan.cli.tokens import token_of, token_option
from caravan.cli.trace import traced
from caravan.errors import ModelError, UsageError
from caravan.wire.dtypes import WORDS

if TYPE_CHECKING:
    from caravan.bench.options import Grid
    from caravan.bench.session import Settings
    from caravan.llm.loader import OnLoad

_FORMATS = click.Choice(("csv", "json", "jsonl", "md", "sql", "none"))
_SHOWING_USE = frozenset(("json", "jsonl", "md"))
_PRIORITIES = click.Choice(("-1", "0", "1", "2", "3"))
_WIRE_TYPES = click.Choice(tuple(WORDS))
_SWITCH = click.Choice(("on", "off"))
_TEST_FIELDS = frozenset(option.field for option in OPTIONS)
_LISTS = """Several values of a test parameter are joined by ',' or given by repeating it; all
combinations run. Whole numbers may be ranges: FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR."""


class BenchCommand(click.Command):
    """A command whose options are known by their whole name, and are shown in two sections."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        # click would read the unknown `-mmp` as `-m mp`, which nobody means.
        takes_value = {
            name: not getattr(param, "is_flag", False)
            for param in self.get_params(ctx)
            for name in (*param.opts, *param.secondary_opts)
        }
        rest = iter(args)
        for arg in rest:
            if arg == "--":
                break
            if not arg.startswith("-") or arg == "-":
                continue
            name, equals, _ = arg.partition("=")
            if dashed(name) not in takes_value:
                raise click.NoSuchOption(name, ctx=ctx)
            if takes_value[dashed(name)] and not equals:
                next(rest, None)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        for title, wanted in (("Options", False), ("Test parameters", True)):
            chosen = (param for param in params if (param.name in _TEST_FIELDS) == wanted)
            records = [record for param in chosen if (record := param.get_help_record(ctx))]
            with formatter.section(title):
                formatter.write_dl(records, col_max=34)


def _test_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(OPTIONS):
        decorate = click.option(
            option.field,
            *option.flags,
            metavar=option.metavar,
            multiple=True,
            help=f"{option.help} (default: {option.default_text})",
        )
        function = decorate(function)
    return function


def _not_yet(ctx: click.Context, param: click.Parameter, value: object) -> None:
    if value:
        raise UsageError(f"{max(param.opts, key=len)} is not supported yet")


@click.command(
    cls=BenchCommand,
    epilog=_LISTS,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=print_version,
    help="print the versions of caravan and of its engine",
)
@click.option(
    "--numa",
    metavar="<distribute|isolate|numactl>",
    expose_value=False,
    callback=_not_yet,
    help="not yet",
)
@click.option(
    "-r",
    "--repetitions",
    type=click.IntRange(1),
    default=5,
    metavar="<n>",
    help="times to repeat each test (default: 5)",
)
@click.option(
    "--prio",
    type=_PRIORITIES,
    default="0",
    metavar="<-1|0|1|2|3>",
    help="process priority (default: 0)",
)
@click.option(
    "--delay",
    type=Seconds(0),
    default=0,
    metavar="<seconds>",
    help="pause before each test (default: 0)",
)
@click.option(
    "-o",
    "--output",
    type=_FORMATS,
    default="md",
    metavar="<csv|json|jsonl|md|sql>",
    help="format printed to stdout (default: md)",
)
@click.option(
    "-oe",
    "--output-err",
    type=_FORMATS,
    default="none",
    metavar="<csv|json|jsonl|md|sql>",
    help="format printed to stderr (default: none)",
)
@click.option("--list-devices", is_flag=True, help="list the available devices and exit")
@click.option("-v", "--verbose", is_flag=True, help="let the engine say on stderr what it does")
@click.option("--progress", is_flag=True, help="say on stderr how far the tests are")
@click.option("--quiet", is_flag=True, help="do not say on stderr how far a load is")
@click.option("--no-warmup", is_flag=True, help="skip the runs before the measured ones")
@click.option(
    "-rpc",
    "--rpc",
    multiple=True,
    metavar="<host:port,...>",
    help="workers or llama.cpp's RPC servers to use, as RPC0, RPC1, ..."
    " (default: $CARAVAN_RPC or $LLAMA_ARG_RPC)",
)
@click.option(
    "--local-workers",
    type=click.IntRange(1),
    metavar="<n>",
    help="start n workers on this machine and use them as RPC0, RPC1, ..., each with the threads"
    " that -t says (default without -t: the cores divided by n)",
)
@token_option(
    "token to show to workers that ask for one (default: $CARAVAN_TOKEN)", metavar="<filename>"
)
@tls_options(
    ca="CA of the workers' certificates; no worker is then talked to without TLS (default:"
    " $CARAVAN_TLS_CA)",
    cert="certificate for workers that want to see one (default: $CARAVAN_TLS_CERT)",
    key="its private key (default: $CARAVAN_TLS_KEY)",
    metavar="<filename>",
)
@click.option(
    "--no-direct-copies",
    is_flag=True,
    help="let all copies between workers pass this process",
)
@click.option(
    "--wire-dtype",
    type=_WIRE_TYPES,
    default="f32",
    metavar="<f32|f16|bf16>",
    help="how activations travel between devices: f16 and bf16 halve their bytes (default: f32)",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=30.0,
    metavar="<seconds>",
    help="bound on every wait for a worker (default: 30)",
)
@click.option(
    "--utilization",
    is_flag=True,
    help="tell how much of each test's time every worker's device was computing, waiting for"
    " input, sending and idle",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="<filename>",
    help="write a timeline of all devices, for Chrome's tracing or ui.perfetto.dev",
)
@click.option(
    "--fit",
    type=_SWITCH,
    default="on",
    metavar="<on|off>",
    help="refuse what does not fit before loading it; off: try, whatever the workers say is free"
    " (default: on)",
)
@split_option(
    "without -ts: auto: layers go where these tests are fastest, memory: by free memory, even:"
    " equally many to each device (default: auto)",
    metavar="<auto|memory|even>",
)
@click.option("--offline", is_flag=True, help="fetch nothing: use a sample only if it is here")
@click.option(
    "-hf",
    "-hfr",
    "--hf-repo",
    metavar="<user>/<model>",
    expose_value=False,
    callback=_not_yet,
    help="not yet",
)
@click.option(
    "-hff", "--hf-file", metavar="<file>", expose_value=False, callback=_not_yet, help="not yet"
)
@click.option(
    "-hft", "--hf-token", metavar="<token>", expose_value=False, callback=_not_yet, help="not yet"
)
@_test_options
def command(**given: Any) -> None:
    """Measure speed, with llama-bench's options and tables."""
    from caravan.bench.options import read_grid
    from caravan.bench.rig import open_rig
    from caravan.bench.session import bench, list_devices
    from caravan.llm.cores import physical_cores

    cores = physical_cores()
    texts = {field: given.pop(field) for field in _TEST_FIELDS}
    grid = read_grid(texts, cores)
    threads = grid["n_threads"] if texts["n_threads"] else ()
    settings = _settings(given, cores, threads, grid)
    _print_any_text(sys.stdout)
    if given["list_devices"]:
        list_devices(settings, open_rig, out=sys.stdout)
        return
    find = _cached_model if given["offline"] else model_path
    if settings.utilization and not {settings.output, settings.output_err} & _SHOWING_USE:
        click.echo("caravan: note: only md, json and jsonl show the utilization", err=True)
    elif settings.utilization and not (
        settings.endpoints or settings.local_workers or settings.local_devices
    ):
        click.echo("caravan: note: without workers there is no utilization to show", err=True)
    with traced(given["trace"], grid["model"]):
        rig = partial(open_rig, show_load=partial(_shown_load, given["quiet"], settings))
        bench(grid, settings, rig, find, out=sys.stdout, err=sys.stderr)


def _shown_load(quiet: bool, settings: Settings) -> AbstractContextManager[OnLoad | None]:
    """Not where results are printed to stderr, too."""
    return shown_loading(quiet or settings.output_err != "none", passing=True)


def _teller(given: dict[str, Any]) -> Callable[[str], None]:
    """Tells people a line on stderr, if nothing else is to be there."""
    silent = given["quiet"] or given["output_err"] != "none"
    return (lambda line: None) if silent else tell


def _settings(given: dict[str, Any], cores: int, threads: Sequence[int], grid: Grid) -> Settings:
    from caravan.bench.plan import jobs
    from caravan.bench.run import RunSettings
    from caravan.bench.session import Settings, threads_of_workers
    from caravan.llm.connecting import untold
    from caravan.plan.auto import splitter_of
    from caravan.worker.names import needed

    local = given["local_workers"] or 0
    local_devices = tuple(needed(grid["devices"]))
    return Settings(
        run=RunSettings(given["repetitions"], not given["no_warmup"], given["delay"]),
        output=given["output"],
        output_err=given["output_err"],
        progress=given["progress"],
        verbose=given["verbose"],
        endpoints=endpoints(given["rpc"], local),
        local_workers=local,
        local_devices=local_devices,
        worker_threads=threads_of_workers(local + untold(local_devices), threads, cores),
        timeout=given["timeout"],
        direct_copies=not given["no_direct_copies"],
        wire_dtype=given["wire_dtype"],
        priority=int(given["prio"]),
        math_cores=cores,
        utilization=given["utilization"],
        fit=given["fit"] == "on",
        splitter=splitter_of(given["split"], jobs(grid), _teller(given)),
        token=token_of(given["token_file"]),
        tls=of_head(given),
    )


def _cached_model(name: str) -> Path:
    from caravan.models.cache import models_dir
    from caravan.models.catalog import SAMPLES
    from caravan.models.fetch import cached

    if name in SAMPLES and not Path(name).is_file() and not cached(SAMPLES[name], models_dir()):
        raise ModelError(f"{name} is not in {models_dir()}, and --offline forbids to fetch it")
    return model_path(name)


def _print_any_text(stream: TextIO) -> None:
    # A file name, or the `±` of the table, must not end a run whose terminal cannot show it.
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
