"""`caravan chat`: talk with a model in a terminal. Answers go to stdout and nothing else does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.head import Head, head_of, sampling_of, tell
from caravan.cli.head_options import (
    compute_options,
    model_option,
    sampling_options,
    told_options,
    worker_options,
)
from caravan.cli.main import dashed
from caravan.cli.streamed import Streamed
from caravan.cli.typed import history_file, is_screen, on_screen, piped

if TYPE_CHECKING:
    from caravan.llm import Chat, ContextParams, Model, SamplingParams


@click.command(
    "chat",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@model_option
@click.option(
    "-sys", "--system-prompt", default="", metavar="TEXT", help="Tell the model what to be."
)
@click.option(
    "--chat-template",
    default=None,
    metavar="FILE|TEXT",
    help="Jinja to make prompts with.  [default: the model's own]",
)
@click.option(
    "-n",
    "--predict",
    type=click.IntRange(-1),
    default=-1,
    metavar="N",
    help="Tokens of an answer at most; -1: no bound.",
)
@click.option("--no-history", is_flag=True, help="Keep no history of what is typed.")
@compute_options("Context size; 0: 4096, or the model's own if that is smaller.")
@sampling_options
@worker_options
@told_options
def command(**options: Any) -> None:
    """Talk with a model, on workers or on this machine alone.

    Without a terminal each line of stdin is said in turn, and the answers go to stdout.
    """
    head, sampling = head_of(options), sampling_of(options)
    screen = is_screen()
    history = None if options["no_history"] else history_file()
    out = Streamed(clean=screen)
    with head.traced(), head.opened(out.end_line) as opened:
        from caravan.plan.job import Job

        params = _sized(head.context_params, opened.path)
        with (
            opened.load(params, Job(512, 128)) as model,
            _chat(model, params, sampling, options) as chat,
        ):
            _talk(head, chat, out, screen, history)


def _talk(head: Head, chat: Chat, out: Streamed, screen: bool, history: Path | None) -> None:
    from caravan.cli.talk import Talk

    if screen and not head.quiet:
        model = chat.context.model
        where = ", ".join(device.name for device in model.devices) or "the CPU"
        tell(f"{model.description} on {where}; /help shows what there is")
    talk = Talk(chat, out, screen=screen, quiet=head.quiet)
    talk.run(on_screen(history) if screen else piped)


def _chat(
    model: Model, params: ContextParams, sampling: SamplingParams, options: dict[str, Any]
) -> Chat:
    from caravan.llm import Chat

    return Chat(
        model,
        system=options["system_prompt"],
        template=options["chat_template"],
        sampling=sampling,
        max_tokens=options["predict"],
        params=params,
    )


def _sized(params: ContextParams, path: Path) -> ContextParams:
    from caravan.llm.params import usual_n_ctx
    from caravan.models.ledger import known_header

    return replace(params, n_ctx=params.n_ctx or usual_n_ctx(known_header(path).context))
