"""`caravan run`: complete a text. The text goes to stdout and nothing else does."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.download import model_path
from caravan.cli.endpoints import device_list, endpoints
from caravan.cli.loading import shown_loading
from caravan.cli.main import dashed
from caravan.cli.seconds import Seconds
from caravan.cli.tls_options import HEAD, of_head, tls_options
from caravan.cli.tokens import token_of, token_option
from caravan.cli.trace import traced
from caravan.errors import CaravanError, UsageError
from caravan.wire.dtypes import WORDS

if TYPE_CHECKING:
    from caravan.cli.loading import Shown
    from caravan.errors import WorkerLost
    from caravan.llm.complete import Report
    from caravan.llm.needs import Needs
    from caravan.llm.resume import Resume

_MIB = 1 << 20


@click.command(
    "run",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@click.option("-m", "--model", required=True, metavar="FILE|NAME", help="GGUF file, or smollm2.")
@click.option("-p", "--prompt", default=None, help="The text to continue; - reads stdin.")
@click.option("-f", "--file", default=None, metavar="FILE", help="Read the prompt from a file.")
@click.option(
    "-n",
    "--predict",
    type=click.IntRange(-1),
    default=-1,
    metavar="N",
    help="Tokens at most; -1: no bound.",
)
@click.option("-c", "--ctx-size", default=0, metavar="N", help="Context size; 0: what is needed.")
@click.option(
    "-b",
    "--batch-size",
    default=2048,
    show_default=True,
    metavar="N",
    help="Tokens handed to the engine at a time.",
)
@click.option(
    "-ub",
    "--ubatch-size",
    default=512,
    show_default=True,
    metavar="N",
    help="Tokens computed at a time, the unit of the pipeline.",
)
@click.option(
    "-t",
    "--threads",
    type=click.IntRange(0, 512),
    default=0,
    metavar="N",
    help="CPU threads, of each local worker too; 0: one a physical core, for local workers a"
    " share of them.",
)
@click.option(
    "-ngl",
    "--n-gpu-layers",
    type=click.IntRange(-1),
    default=-1,
    metavar="N",
    help="Layers on devices; -1: all.",
)
@click.option("-ts", "--tensor-split", default="", metavar="A/B/…", help="Shares of the devices.")
@click.option(
    "-dev",
    "--device",
    default="",
    metavar="D0,D1,…",
    help="Devices, in order; local:CPU:1 is a worker with one thread, started here.",
)
@click.option(
    "-fa",
    "--flash-attn",
    type=click.Choice(("on", "off", "auto")),
    default="auto",
    help="Flash attention; auto: where the devices can.",
)
@click.option(
    "-ctk",
    "--cache-type-k",
    default="f16",
    show_default=True,
    metavar="TYPE",
    help="Number format of the K cache.",
)
@click.option(
    "-ctv",
    "--cache-type-v",
    default="f16",
    show_default=True,
    metavar="TYPE",
    help="Number format of the V cache.",
)
@click.option("-nr", "--no-repack", is_flag=True, help="Leave the CPU's weights as they are.")
@click.option(
    "--temp",
    default=0.8,
    show_default=True,
    metavar="T",
    help="Temperature; 0: always the most likely token.",
)
@click.option(
    "--top-k",
    default=40,
    show_default=True,
    metavar="K",
    help="Choose among the K most likely tokens; 0: all.",
)
@click.option(
    "--top-p",
    default=0.95,
    show_default=True,
    metavar="P",
    help="Choose among the most likely tokens that sum up to P; 1: all.",
)
@click.option(
    "--min-p",
    default=0.05,
    show_default=True,
    metavar="P",
    help="Drop tokens less likely than P times the most likely one; 0: none.",
)
@click.option(
    "--repeat-penalty",
    default=1.0,
    show_default=True,
    metavar="X",
    help="Make the last 64 tokens less likely by this factor; 1: off.",
)
@click.option(
    "-s",
    "--seed",
    type=click.IntRange(-1),
    default=-1,
    metavar="N",
    help="Of the random choice; -1: another each time.",
)
@click.option(
    "-rpc",
    "--rpc",
    multiple=True,
    metavar="HOST:PORT,…",
    help="Workers to use.  [default: $CARAVAN_RPC or $LLAMA_ARG_RPC]",
)
@click.option(
    "--local-workers",
    type=click.IntRange(0, 16),
    default=0,
    metavar="N",
    help="Start N workers on this machine, with -t threads each.",
)
@token_option("Token to show to workers that ask for one.  [default: $CARAVAN_TOKEN]")
@tls_options(**HEAD)
@click.option(
    "--no-direct-copies", is_flag=True, help="Let all copies between workers pass this process."
)
@click.option(
    "--wire-dtype",
    type=click.Choice(tuple(WORDS)),
    default="f32",
    show_default=True,
    help="How activations travel between devices; f16 and bf16 halve their bytes.",
)
@click.option(
    "--poll",
    type=click.IntRange(0, 100),
    default=50,
    show_default=True,
    metavar="0...100",
    help="How long to look for an answer of a worker before sleeping.",
)
@click.option(
    "--timeout",
    type=Seconds(),
    default=30.0,
    show_default=True,
    help="How long a worker may owe an answer.",
)
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on when a worker is lost: with it when it is back, else without it.",
)
@click.option(
    "--resume-wait",
    type=Seconds(0.0),
    default=60.0,
    show_default=True,
    help="How long a lost worker is waited for.",
)
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write a timeline of all devices, for Chrome's tracing or ui.perfetto.dev.",
)
@click.option(
    "--fit",
    type=click.Choice(("on", "off")),
    default="on",
    show_default=True,
    help="Refuse what does not fit before loading it; off: try, whatever the workers say is free.",
)
@click.option("-v", "--verbose", is_flag=True, help="The engine's log on stderr.")
@click.option("-q", "--quiet", is_flag=True, help="Nothing on stderr but errors.")
def command(**options: Any) -> None:
    """Complete a text with a model, on workers or on this machine alone."""
    prompt = _prompt(options["prompt"], options["file"])
    # all that can be refused is refused before anything is fetched or started
    workers = endpoints(options["rpc"], options["local_workers"])
    names = device_list(options["device"])
    options["token"] = token_of(options["token_file"])
    options["tls"] = of_head(options)
    params = _params(options)
    text = _Text()
    with traced(options["trace"], [options["model"]]):
        try:
            report = _run(options, prompt, workers, names, params, text)
        except CaravanError:
            text.end_line()
            raise
        # stdout gets the text and nothing else; where both go to one screen, a new line begins
        if sys.stdout.isatty() or not options["quiet"]:
            click.echo(err=not sys.stdout.isatty())
        if not options["quiet"]:
            click.echo(_told(report), err=True)


def _run(
    options: dict[str, Any],
    prompt: str,
    workers: Sequence[str],
    names: Sequence[str],
    params: dict[str, Any],
    text: _Text,
) -> Report:
    path = model_path(options["model"])

    from caravan import engine
    from caravan.llm.complete import complete
    from caravan.llm.opening import Workers, open_devices

    engine.set_verbose(options["verbose"])
    wanted = Workers(
        workers,
        local_workers=options["local_workers"],
        threads=options["threads"],
        timeout=options["timeout"],
        direct_copies=not options["no_direct_copies"],
        wire_dtype=options["wire_dtype"],
        poll=options["poll"],
        token=options["token"],
        tls=options["tls"],
    )
    with open_devices(wanted, names) as devices, shown_loading(options["quiet"]) as shown:
        return complete(
            str(path),
            prompt,
            max_tokens=options["predict"],
            devices=devices,
            on_text=text.write,
            on_load=shown,
            on_needs=None if options["quiet"] else _show_needs,
            fit=options["fit"] == "on",
            resume=_resume(options, text, shown),
            **params,
        )


def _resume(options: dict[str, Any], text: _Text, shown: Shown | None) -> Resume | bool:
    """What is done about lost workers; each loss is told in a line, below bars that broke off."""
    from caravan.llm.resume import Resume

    if not options["resume"]:
        return False
    if options["quiet"]:
        return Resume(options["resume_wait"])

    def say(line: str) -> None:
        text.end_line()
        if shown is not None:
            shown.end()
        click.echo(f"caravan: {line}", err=True)

    def told(resumed: object) -> None:
        say(str(resumed))

    def waiting(lost: WorkerLost, seconds: float) -> None:
        say(f"{lost}; waiting for it, {seconds:g} s at most")

    return Resume(options["resume_wait"], on_resume=told, on_wait=waiting)


def _show_needs(needs: Needs) -> None:
    """A line for each device, before anything is sent to it."""
    for device in needs.devices:
        click.echo(f"caravan: {device}", err=True)
    if not needs.pipeline:
        click.echo(
            "caravan: note: no room for several batches at a time: prompts take the devices in"
            " turns (a smaller -c or -ub makes room)",
            err=True,
        )


def _params(options: dict[str, Any]) -> dict[str, Any]:
    from caravan.llm import ContextParams, ModelParams, SamplingParams

    return {
        "model_params": ModelParams(
            n_gpu_layers=options["n_gpu_layers"],
            tensor_split=_shares(options["tensor_split"]),
            repack=not options["no_repack"],
        ),
        "context_params": ContextParams(
            n_ctx=options["ctx_size"],
            n_batch=options["batch_size"],
            n_ubatch=options["ubatch_size"],
            n_threads=options["threads"],
            type_k=options["cache_type_k"],
            type_v=options["cache_type_v"],
            flash_attn=options["flash_attn"],
        ),
        "sampling": SamplingParams(
            temp=options["temp"],
            top_k=options["top_k"],
            top_p=options["top_p"],
            min_p=options["min_p"],
            repeat_penalty=options["repeat_penalty"],
            seed=None if options["seed"] == -1 else options["seed"],
        ),
    }


def _prompt(text: str | None, file: str | None) -> str:
    if (text is None) == (file is None):
        raise UsageError("give the prompt with either -p or -f")
    if text is not None and text != "-":
        return text
    # bytes that are no text are the tokenizer's to see, not a reason to fail
    with click.open_file(
        "-" if file is None else file, encoding="utf-8", errors="replace"
    ) as source:
        # the newline that every editor adds; llama.cpp drops it too
        return str(source.read()).removesuffix("\n")


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _split(text.replace(",", "/"), "/"))
    except ValueError:
        raise UsageError(f"--tensor-split {text!r}: expected numbers joined by '/'") from None


class _Text:
    """The text on stdout, piece by piece."""

    def __init__(self) -> None:
        self._begun = False

    def write(self, text: str) -> None:
        self._begun = True
        sys.stdout.write(text)
        sys.stdout.flush()

    def end_line(self) -> None:
        """On a screen, what is told next begins a new line."""
        if self._begun and sys.stdout.isatty():
            click.echo()
        self._begun = False


def _told(report: Report) -> str:
    """The statistics, for people."""
    stats = report.stats
    lines = [
        f"prompt: {stats.n_prompt} tokens, {stats.prompt_rate:.2f} t/s",
        # the first token comes from the prompt
        f"decode: {stats.n_gen} tokens, {stats.decode_rate:.2f} t/s"
        if stats.n_steps
        else f"decode: {stats.n_gen} tokens",
    ]
    for device in report.devices:
        memory = ", ".join(f"{use} {size / _MIB:.1f} MiB" for use, size in device.memory.items())
        layers = _layers(device.layers, report.n_layer)
        lines.append(f"{device.name} ({device.where}): {layers}{'; ' if memory else ''}{memory}")
    return "\n".join(lines)


def _layers(layers: list[int], n_layer: int) -> str:
    """`layers 0-14`, with `+ output` for the one after the last."""
    blocks = [layer for layer in layers if layer < n_layer]
    text = f"layers {blocks[0]}-{blocks[-1]}" if blocks else "no layers"
    if len(blocks) == 1:
        text = f"layer {blocks[0]}"
    return f"{text} + output" if n_layer in layers else text
