"""`caravan run`: complete a text. The text goes to stdout and nothing else does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from caravan.cli.download import model_path
from caravan.cli.main import dashed
from caravan.errors import UsageError

if TYPE_CHECKING:
    from caravan.llm.complete import Report

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
@click.option("-f", "--file", "prompt_file", type=click.File(), help="Read the prompt from a file.")
@click.option("-n", "--predict", default=-1, metavar="N", help="Tokens at most; -1: no bound.")
@click.option("-c", "--ctx-size", default=0, metavar="N", help="Context size; 0: what is needed.")
@click.option("-b", "--batch-size", default=2048, show_default=True, metavar="N")
@click.option("-ub", "--ubatch-size", default=512, show_default=True, metavar="N")
@click.option("-t", "--threads", type=click.IntRange(0, 512), default=0, metavar="N")
@click.option("-ngl", "--n-gpu-layers", default=-1, metavar="N", help="Layers on devices; -1: all.")
@click.option("-ts", "--tensor-split", default="", metavar="A/B/…", help="Shares of the devices.")
@click.option("-dev", "--device", default="", metavar="D0/D1/…", help="Devices, in order.")
@click.option("-fa", "--flash-attn", type=click.Choice(("on", "off", "auto")), default="auto")
@click.option("-ctk", "--cache-type-k", default="f16", show_default=True, metavar="TYPE")
@click.option("-ctv", "--cache-type-v", default="f16", show_default=True, metavar="TYPE")
@click.option("-nr", "--no-repack", is_flag=True, help="Leave the CPU's weights as they are.")
@click.option("--temp", default=0.8, show_default=True, help="0: always the most likely token.")
@click.option("--top-k", default=40, show_default=True)
@click.option("--top-p", default=0.95, show_default=True)
@click.option("--min-p", default=0.05, show_default=True)
@click.option("--repeat-penalty", default=1.0, show_default=True)
@click.option("-s", "--seed", type=int, default=None, help="Of the random choice.")
@click.option(
    "-rpc",
    "--rpc",
    default="",
    envvar=["CARAVAN_RPC", "LLAMA_ARG_RPC"],
    metavar="HOST:PORT,…",
    help="Workers to use.",
)
@click.option(
    "--local-workers",
    type=click.IntRange(0, 16),
    default=0,
    metavar="N",
    help="Start N workers on this machine, with -t threads each (default: a share of the cores).",
)
@click.option("--timeout", type=click.FloatRange(min=0.1), default=30.0, show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="The engine's log on stderr.")
def command(**options: Any) -> None:
    """Complete a text with a model, on workers or on this machine alone."""
    prompt = _prompt(options["prompt"], options["prompt_file"])
    path = model_path(options["model"])

    from caravan import engine
    from caravan.llm.complete import complete
    from caravan.llm.opening import open_devices

    engine.set_verbose(options["verbose"])
    with open_devices(
        _endpoints(options),
        local_workers=options["local_workers"],
        worker_threads=options["threads"],
        names=_split(options["device"], "/"),
        timeout=options["timeout"],
    ) as devices:
        report = complete(
            str(path),
            prompt,
            max_tokens=options["predict"],
            devices=devices,
            on_text=_write,
            **_params(options),
        )
    # stdout gets the text and nothing else; where both go to one screen, a new line begins
    click.echo(err=not sys.stdout.isatty())
    click.echo(_told(report), err=True)


def _endpoints(options: dict[str, Any]) -> list[str]:
    """Those of --rpc; those of the environment give way to --local-workers."""
    source = click.get_current_context().get_parameter_source("rpc")
    given = source is ParameterSource.COMMANDLINE
    if options["local_workers"] and given:
        raise UsageError("--rpc and --local-workers do not go together")
    return [] if options["local_workers"] else _split(options["rpc"], ",")


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
            seed=options["seed"],
        ),
    }


def _prompt(text: str | None, file: Any) -> str:
    if (text is None) == (file is None):
        raise UsageError("give the prompt with either -p or -f")
    if file is not None:
        return str(file.read())
    return sys.stdin.read() if text == "-" else str(text)


def _split(text: str, separator: str) -> list[str]:
    return [part.strip() for part in text.split(separator) if part.strip()]


def _shares(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _split(text.replace(",", "/"), "/"))
    except ValueError:
        raise UsageError(f"--tensor-split {text!r}: expected numbers joined by '/'") from None


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _told(report: Report) -> str:
    """The statistics, for people."""
    stats = report.stats
    lines = [
        f"prompt: {stats.n_prompt} tokens, {stats.prompt_rate:.2f} t/s",
        f"decode: {stats.n_gen} tokens, {stats.decode_rate:.2f} t/s",
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
    return f"{text} + output" if n_layer in layers else text
