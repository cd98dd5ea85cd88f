"""The options of commands that load a model: `run`, `chat` and `serve` have the same ones.

Groups of click options, one decorator each; `caravan.cli.head` says what they mean.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from caravan.cli.seconds import Seconds
from caravan.cli.tls_options import HEAD, tls_options
from caravan.cli.tokens import token_option
from caravan.wire.dtypes import WORDS

_F = TypeVar("_F", bound=Callable[..., Any])
# as plan.auto.splitter_of takes them
SPLITS = ("auto", "memory", "even")


def _with(function: _F, *options: Callable[[_F], _F]) -> _F:
    """All of them, to be shown in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def model_option(function: _F) -> _F:
    """The model."""
    option = click.option(
        "-m", "--model", required=True, metavar="FILE|NAME", help="GGUF file, or smollm2."
    )
    return option(function)


def split_option(text: str, **more: Any) -> Callable[[_F], _F]:
    """`--split`, with this help."""
    return click.option("--split", type=click.Choice(SPLITS), default="auto", help=text, **more)


# what a model is loaded with, and its contexts are made with, but for the size of the context
_COMPUTE: dict[str, Callable[[Any], Any]] = {
    "batch_size": click.option(
        "-b",
        "--batch-size",
        default=2048,
        show_default=True,
        metavar="N",
        help="Tokens handed to the engine at a time.",
    ),
    "ubatch_size": click.option(
        "-ub",
        "--ubatch-size",
        default=512,
        show_default=True,
        metavar="N",
        help="Tokens computed at a time, the unit of the pipeline.",
    ),
    "threads": click.option(
        "-t",
        "--threads",
        type=click.IntRange(0, 512),
        default=0,
        metavar="N",
        help="CPU threads, of each local worker too; 0: one a physical core, for local workers"
        " a share of them.",
    ),
    "n_gpu_layers": click.option(
        "-ngl",
        "--n-gpu-layers",
        type=click.IntRange(-1),
        default=-1,
        metavar="N",
        help="Layers on devices; -1: all.",
    ),
    "tensor_split": click.option(
        "-ts", "--tensor-split", default="", metavar="A/B/…", help="Shares of the devices."
    ),
    "split": split_option(
        "Without -ts: auto: layers go where they are computed fastest, memory: by free memory,"
        " even: equally many to each device."
    ),
    "device": click.option(
        "-dev",
        "--device",
        default="",
        metavar="D0,D1,…",
        help="Devices, in order; local:CPU:1 is a worker with one thread, started here.",
    ),
    "flash_attn": click.option(
        "-fa",
        "--flash-attn",
        type=click.Choice(("on", "off", "auto")),
        default="auto",
        help="Flash attention; auto: where the devices can.",
    ),
    "cache_type_k": click.option(
        "-ctk",
        "--cache-type-k",
        default="f16",
        show_default=True,
        metavar="TYPE",
        help="Number format of the K cache.",
    ),
    "cache_type_v": click.option(
        "-ctv",
        "--cache-type-v",
        default="f16",
        show_default=True,
        metavar="TYPE",
        help="Number format of the V cache.",
    ),
    "no_repack": click.option(
        "-nr", "--no-repack", is_flag=True, help="Leave the CPU's weights as they are."
    ),
    "fit": click.option(
        "--fit",
        type=click.Choice(("on", "off")),
        default="on",
        show_default=True,
        help="Refuse what does not fit before loading it; off: try, whatever the workers say is"
        " free.",
    ),
}
# what decides where layers go, which a plan finds out
_PLACING = ("n_gpu_layers", "tensor_split", "split", "fit")


def compute_options(ctx_size: str, *, planned: bool = False) -> Callable[[_F], _F]:
    """What a model is loaded with, and its contexts are made with.

    Args:
        ctx_size: the help of that option.
        planned: without what a plan finds out.
    """
    names = ("-c", "--ctx-size", "--ctx") if planned else ("-c", "--ctx-size")
    size = click.option("ctx_size", *names, default=0, metavar="N", help=ctx_size)
    chosen = [option for name, option in _COMPUTE.items() if not (planned and name in _PLACING)]
    return lambda function: _with(function, size, *chosen)


def sampling_options(function: _F) -> _F:
    """How the next token is chosen."""
    return _with(
        function,
        click.option(
            "--temp",
            default=0.8,
            show_default=True,
            metavar="T",
            help="Temperature; 0: always the most likely token.",
        ),
        click.option(
            "--top-k",
            default=40,
            show_default=True,
            metavar="K",
            help="Choose among the K most likely tokens; 0: all.",
        ),
        click.option(
            "--top-p",
            default=0.95,
            show_default=True,
            metavar="P",
            help="Choose among the most likely tokens that sum up to P; 1: all.",
        ),
        click.option(
            "--min-p",
            default=0.05,
            show_default=True,
            metavar="P",
            help="Drop tokens less likely than P times the most likely one; 0: none.",
        ),
        click.option(
            "--repeat-penalty",
            default=1.0,
            show_default=True,
            metavar="X",
            help="Make the last 64 tokens less likely by this factor; 1: off.",
        ),
        click.option(
            "-s",
            "--seed",
            type=click.IntRange(-1),
            default=-1,
            metavar="N",
            help="Of the random choice; -1: another each time.",
        ),
    )


def reach_options(function: _F) -> _F:
    """Which workers there are, and how to reach them."""
    return _with(
        function,
        click.option(
            "-rpc",
            "--rpc",
            multiple=True,
            metavar="HOST:PORT,…",
            help="Workers to use.  [default: $CARAVAN_RPC or $LLAMA_ARG_RPC]",
        ),
        click.option(
            "--local-workers",
            type=click.IntRange(0, 16),
            default=0,
            metavar="N",
            help="Start N workers on this machine, with -t threads each.",
        ),
        token_option("Token to show to workers that ask for one.  [default: $CARAVAN_TOKEN]"),
        tls_options(**HEAD),
        click.option(
            "--no-direct-copies",
            is_flag=True,
            help="Let all copies between workers pass this process.",
        ),
        click.option(
            "--timeout",
            type=Seconds(),
            default=30.0,
            show_default=True,
            help="How long a worker may owe an answer.",
        ),
    )


def worker_options(function: _F) -> _F:
    """The same, how to talk to them, and what to do when one is lost."""
    return _with(
        function,
        reach_options,
        click.option(
            "--wire-dtype",
            type=click.Choice(tuple(WORDS)),
            default="f32",
            show_default=True,
            help="How activations travel between devices; f16 and bf16 halve their bytes.",
        ),
        click.option(
            "--poll",
            type=click.IntRange(0, 100),
            default=50,
            show_default=True,
            metavar="0...100",
            help="How long to look for an answer of a worker before sleeping.",
        ),
        click.option(
            "--resume/--no-resume",
            default=True,
            show_default=True,
            help="Go on when a worker is lost: with it when it is back, else without it.",
        ),
        click.option(
            "--resume-wait",
            type=Seconds(0.0),
            default=60.0,
            show_default=True,
            help="How long a lost worker is waited for.",
        ),
    )


def told_options(function: _F) -> _F:
    """What is told of it, and where."""
    return _with(
        function,
        click.option(
            "--trace",
            type=click.Path(path_type=Path),
            metavar="FILE",
            help="Write a timeline of all devices, for Chrome's tracing or ui.perfetto.dev.",
        ),
        click.option("-v", "--verbose", is_flag=True, help="The engine's log on stderr."),
        click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors."),
    )
