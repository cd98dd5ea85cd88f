"""`caravan demo`: what two workers do for one prompt, in a minute."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from caravan.cli.download import model_path
from caravan.cli.seconds import Seconds

if TYPE_CHECKING:
    from caravan.bench.demo import DemoResult


@click.command("demo", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--timeout",
    type=Seconds(),
    default=30.0,
    show_default=True,
    help="How long a worker may owe an answer.",
)
def command(as_json: bool, timeout: float) -> int:
    """Measure a prompt on one worker and on two, and check the text against the engine alone.

    Starts two workers on this machine and fetches the sample model (98 MB) on first use. The exit
    code is 1 when the text differs.
    """
    path = model_path("smollm2")

    from caravan.bench.demo import demo

    result = demo(path, lambda text: click.echo(text, err=True), timeout=timeout)
    click.echo(json.dumps(asdict(result)) if as_json else _told(result))
    return 0 if result.identical else 1


def _told(result: DemoResult) -> str:
    verdict = "yes" if result.identical else f"NO: {result.text_local!r}"
    rounds = result.speedups
    spread = f" ({min(rounds):.2f} to {max(rounds):.2f})" if len(rounds) > 1 else ""
    return "\n".join(
        (
            "",
            f"prompt on one worker     {result.pp_1:8.1f} tokens/s",
            f"prompt on two workers    {result.pp_2:8.1f} tokens/s",
            f"speed-up                 {result.speedup:8.2f}{spread}",
            "",
            _wrapped(f"answer over two workers: {result.text}"),
            "",
            _wrapped(f"the same text as the engine alone: {verdict}"),
        )
    )


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.fill(line, 80) for line in text.split("\n"))
