"""`caravan run`: complete a text. The text goes to stdout and nothing else does."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.head import Head, head_of, sampling_of
from caravan.cli.head_options import (
    compute_options,
    model_option,
    sampling_options,
    told_options,
    worker_options,
)
from caravan.cli.main import dashed
from caravan.cli.streamed import Streamed
from caravan.errors import CaravanError, UsageError

if TYPE_CHECKING:
    from caravan.llm import SamplingParams
    from caravan.llm.complete import Report

_MIB = 1 << 20
# what is expected, before anything is loaded: letters of a token, tokens of an answer without bound
_LETTERS, _ANSWER = 4, 128


@click.command(
    "run",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@model_option
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
@compute_options("Context size; 0: what is needed.")
@sampling_options
@worker_options
@told_options
def command(**options: Any) -> None:
    """Complete a text with a model, on workers or on this machine alone."""
    prompt = _prompt(options["prompt"], options["file"])
    # all that can be refused is refused before anything is fetched or started
    head, sampling = head_of(options), sampling_of(options)
    text = Streamed()
    with head.traced():
        try:
            report = _run(head, prompt, options["predict"], sampling, text)
        except CaravanError:
            text.end_line()
            raise
        # stdout gets the text and nothing else; where both go to one screen, a new line begins
        if sys.stdout.isatty() or not head.quiet:
            click.echo(err=not sys.stdout.isatty())
        if not head.quiet:
            click.echo(_told(report), err=True)


def _run(
    head: Head, prompt: str, max_tokens: int, sampling: SamplingParams, text: Streamed
) -> Report:
    with head.opened(text.end_line) as opened:
        from caravan.llm.complete import complete
        from caravan.plan.job import Job

        job = Job(len(prompt) // _LETTERS + 1, max_tokens if max_tokens >= 0 else _ANSWER)
        return complete(
            str(opened.path),
            prompt,
            max_tokens=max_tokens,
            devices=opened.devices,
            model_params=opened.model_params,
            context_params=head.context_params,
            sampling=sampling,
            on_text=text.write,
            on_load=opened.on_load,
            on_needs=opened.on_needs,
            fit=opened.fit,
            resume=opened.resume,
            splitter=opened.splitter(job),
        )


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
