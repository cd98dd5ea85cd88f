"""The `caravan` command: finds the subcommand, runs it, turns what went wrong into an exit code.

Nothing heavy may be imported here: a subcommand's module is imported when it is called, not for the
list of commands. 0 done, 1 a failure told in one line, 2 wrong usage, 130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

import click

from caravan.errors import CaravanError, UsageError


class _Entry(NamedTuple):
    module: str
    help: str


# Each module has a `command: click.Command`. The help is repeated here so that showing the list
# imports none of them.
COMMANDS = {
    "bench": _Entry("caravan.cli.bench", "Measure speed, with llama-bench's options and tables."),
    "cache": _Entry("caravan.cli.cache", "List, remove and check the weights that workers keep."),
    "chat": _Entry("caravan.cli.chat", "Talk with a model."),
    "demo": _Entry("caravan.cli.demo", "Show in a minute what two workers do for one prompt."),
    "devices": _Entry("caravan.cli.devices", "List devices, and how copies between them go."),
    "model": _Entry("caravan.cli.model", "Fetch, list and describe model files."),
    "plan": _Entry("caravan.cli.plan", "Predict how fast a model is on which devices."),
    "run": _Entry("caravan.cli.run", "Complete a text with a model."),
    "serve": _Entry("caravan.cli.serve", "Serve a model over HTTP, with OpenAI's API."),
    "tls": _Entry("caravan.cli.tls", "Make a private CA, and certificates for TLS."),
    "token": _Entry("caravan.cli.token", "Make the secret that workers and heads share."),
    "worker": _Entry("caravan.cli.worker", "Lend the devices of this machine."),
}


# How newer versions of click leave to show the help of a group that was given no command.
_NO_ARGUMENTS = getattr(click.exceptions, "NoArgsIsHelpError", ())


def dashed(name: str) -> str:
    """Long options take `_` for `-`, as llama.cpp's tools do."""
    return name.replace("_", "-")


class LazyGroup(click.Group):
    """A group whose commands are looked up in `COMMANDS` and imported on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        try:
            command = importlib.import_module(entry.module).command
        except ModuleNotFoundError as exc:
            if exc.name != entry.module:
                raise
            raise click.UsageError(f"'{cmd_name}' is not part of this installation.") from exc
        if not isinstance(command, click.Command):
            raise TypeError(f"{entry.module}.command is not a click command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.help) for name, entry in COMMANDS.items()])


def print_version(ctx: click.Context, option: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from importlib import metadata

    click.echo(f"caravan {metadata.version('llama-caravan')}")
    click.echo(f"engine {_engine_version()}")
    ctx.exit()


def _engine_version() -> str:
    try:
        from caravan import engine

        loaded = engine.load()
    except CaravanError as exc:
        return f"not usable: {exc}"
    return f"ggml {loaded.version} ({loaded.commit}), {loaded.path}"


@click.group(
    cls=LazyGroup,
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
    help="Print the versions of caravan and of its engine.",
)
def cli() -> None:
    """Run one GGUF model over several machines."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code. A command may return an int as its own."""
    _open_standard_streams()
    try:
        result = cli.main(
            args=None if argv is None else list(argv), prog_name="caravan", standalone_mode=False
        )
        sys.stdout.flush()
    except SystemExit as exc:
        # click leaves this way when the reader of a pipe has gone.
        _close_stdout()
        return exc.code if isinstance(exc.code, int) else 1
    except BaseException as exc:
        if _debugging() and not isinstance(exc, click.ClickException):
            raise
        return _report(exc)
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def _open_standard_streams() -> None:
    """Fill closed ones: whatever is opened next would take their numbers, and get their bytes."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        with contextlib.suppress(OSError):
            os.fstat(number)
            continue
        # the lowest free number is this one
        os.open(os.devnull, os.O_RDWR)
        os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "r" if number == 0 else "w"))  # noqa: SIM115


def _report(exc: BaseException) -> int:
    """Say on stderr, in one line, what happened, and return the exit code for it."""
    if isinstance(exc, (KeyboardInterrupt, click.Abort)):
        _say("caravan: interrupted")
        return 130
    if isinstance(exc, _NO_ARGUMENTS):
        _say(exc.format_message())
        return 2
    if isinstance(exc, click.ClickException):
        _say(f"caravan: error: {_in_our_words(exc)}")
        return 2 if isinstance(exc, click.UsageError) else 1
    if isinstance(exc, OSError) and _is_closed_pipe(exc):
        _close_stdout()
        return 1
    if isinstance(exc, CaravanError):
        _say(f"caravan: error: {_one_line(exc)}")
        return 2 if isinstance(exc, UsageError) else 1
    if isinstance(exc, OSError) and exc.strerror:
        place = f": {exc.filename}" if exc.filename else ""
        _close_stdout()
        _say(f"caravan: error: {exc.strerror}{place}")
        return 1
    hint = "CARAVAN_DEBUG=1 shows where"
    _say(f"caravan: internal error: {type(exc).__name__}: {_one_line(exc)} ({hint})")
    return 1


def _in_our_words(exc: click.ClickException) -> str:
    """click's message, spelled as all others: no capital, no full stop."""
    text = " ".join(exc.format_message().split()).removesuffix(".")
    return text[:1].lower() + text[1:]


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _debugging() -> bool:
    return os.environ.get("CARAVAN_DEBUG", "0") not in ("", "0")


def _is_closed_pipe(exc: OSError) -> bool:
    # Windows says EINVAL where others say EPIPE.
    return exc.errno == errno.EPIPE or (sys.platform == "win32" and exc.errno == errno.EINVAL)


def _close_stdout() -> None:
    """What stdout does not take would fail again, with a message, when the interpreter ends."""
    try:
        sys.stdout.flush()
        return
    except (OSError, ValueError):
        pass
    with contextlib.suppress(OSError, ValueError):
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, sys.stdout.fileno())
        os.close(devnull)
