"""`caravan serve`: an HTTP server with OpenAI's API, for a model on workers or on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from caravan.cli.head import Head, Opened, head_of, sampling_of, tell
from caravan.cli.head_options import (
    compute_options,
    model_option,
    sampling_options,
    told_options,
    worker_options,
)
from caravan.cli.keys import VARIABLE, api_keys
from caravan.cli.main import dashed
from caravan.cli.seconds import Seconds

if TYPE_CHECKING:
    import socket

    from caravan.batching import Batcher
    from caravan.llm import ContextParams, Model, Resume, SamplingParams
    from caravan.llm.chat import ChatTemplate
    from caravan.serve.losses import LossLog
    from caravan.serve.model_service import ModelService
    from caravan.serve.no_batcher import NoBatcher


@click.command(
    "serve",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": dashed,
        "max_content_width": 100,
    },
)
@model_option
@click.option("-H", "--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option(
    "-p",
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port; 0 picks a free one.",
)
@click.option(
    "-np",
    "--slots",
    "--parallel",
    "slots",
    type=click.IntRange(1, 256),
    default=4,
    show_default=True,
    metavar="N",
    help="Requests that are computed at the same time.",
)
@click.option(
    "--queue",
    type=click.IntRange(0, 100_000),
    default=64,
    show_default=True,
    metavar="N",
    help="Requests that may wait for a slot; more are sent away.",
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="A key that lets clients in; others on this machine can see it here. May be given several"
    f" times.  [default: ${VARIABLE}]",
)
@click.option(
    "--api-key-file",
    "key_files",
    multiple=True,
    metavar="FILE",
    help="A file of keys, one a line.",
)
@click.option(
    "-a",
    "--alias",
    default="",
    metavar="NAME",
    help="What clients call the model.  [default: the name of its file]",
)
@click.option(
    "--chat-template",
    default=None,
    metavar="FILE|TEXT",
    help="Another template than the model's own.",
)
@click.option(
    "--cors-origin",
    "cors_origins",
    multiple=True,
    metavar="ORIGIN",
    help="Let pages of this origin ask, such as https://example.org; *: all. May be given several"
    " times.",
)
@click.option(
    "--drain-seconds",
    type=Seconds(0.0),
    default=30.0,
    show_default=True,
    help="How long requests that are there may go on for after SIGTERM or Ctrl-C.",
)
@click.option("--log-requests", is_flag=True, help="A line on stderr for each request.")
@compute_options("Context size of a slot: prompt and answer of a request.  [default: 4096]")
@sampling_options
@worker_options
@told_options
def command(**options: Any) -> None:
    """Serve a model over HTTP, with OpenAI's API and a page.

    Prints `serving MODEL at URL` once it accepts connections, and runs until it is told to stop.
    The sampling options are for what requests do not say.
    """
    head, sampling = head_of(options), sampling_of(options)
    keys = api_keys(options["keys"], options["key_files"])

    from caravan.serve.server import listener

    with listener(options["host"], options["port"]) as sock, head.traced():
        if not keys and not _is_private(sock) and not head.quiet:
            tell(
                "note: everybody who reaches this address may use the model: there is no"
                f" --api-key-file, and {VARIABLE} is not set"
            )
        settings = _Settings(
            keys,
            options["slots"],
            options["queue"],
            options["alias"],
            options["chat_template"],
            options["cors_origins"],
            options["drain_seconds"],
            options["log_requests"],
        )
        _serve(head, sampling, settings, sock)


@dataclass(frozen=True, slots=True)
class _Settings:
    """The options that no other command has."""

    keys: list[str]
    slots: int
    queue: int
    alias: str
    chat_template: str | None
    cors_origins: tuple[str, ...]
    drain_seconds: float
    log_requests: bool


def _serve(head: Head, sampling: SamplingParams, settings: _Settings, sock: socket.socket) -> None:
    with head.opened() as opened, _service(head, opened, sampling, settings) as service:
        from caravan.serve.app import create_app
        from caravan.serve.server import HttpServer

        app = create_app(
            service,
            keys=settings.keys,
            cors_origins=settings.cors_origins,
            local_only=not settings.keys and _is_private(sock),
            log=_log if settings.log_requests else None,
            on_error=_tell_error,
        )

        def ready() -> None:
            click.echo(f"serving {service.model_name} at {_url(sock)}")

        server = HttpServer(
            app,
            on_ready=ready,
            drain_seconds=settings.drain_seconds,
            failed=lambda: service.batcher.error,
        )
        server.run_on(sock)


@contextmanager
def _service(
    head: Head, opened: Opened, sampling: SamplingParams, settings: _Settings
) -> Iterator[ModelService]:
    from caravan.batching import planned_context
    from caravan.plan.job import Job
    from caravan.serve.cluster import ClusterView
    from caravan.serve.losses import LossLog
    from caravan.serve.model_service import ModelService

    losses = LossLog()
    opened = replace(opened, resume=_noted(opened.resume, losses))
    name = settings.alias or _name(head.model)
    params = head.context_params
    planned = planned_context(opened.path, settings.slots, params.n_ctx, params)
    with opened.load(planned, Job(512, 128, settings.slots)) as model:
        template = _template(model, settings.chat_template, head.quiet)
        with (
            _batcher(model, params, settings, opened.resume, head.quiet) as batcher,
            ClusterView(model, batcher=batcher, losses=losses, name=name) as view,
            ModelService(
                model,
                batcher,
                name=name,
                template=template,
                sampling=sampling,
                params=params,
                view=view,
            ) as service,
        ):
            yield service


def _batcher(
    model: Model,
    params: ContextParams,
    settings: _Settings,
    resume: Resume | bool,
    quiet: bool,
) -> Batcher | NoBatcher:
    """With a note, what stands for one if the model makes embeddings only."""
    from caravan.batching import Batcher
    from caravan.errors import NoConversations
    from caravan.serve.no_batcher import NoBatcher

    try:
        return Batcher(
            model,
            n_slots=settings.slots,
            n_ctx=params.n_ctx,
            queue=settings.queue,
            params=params,
            resume=resume,
        )
    except NoConversations as exc:
        if not quiet:
            tell(f"note: embeddings only: {exc}")
        return NoBatcher(model, params.n_ctx)


def _name(model: str) -> str:
    """`smollm2`, or that of the file."""
    return Path(model).stem if model.endswith(".gguf") else Path(model).name


def _template(model: Model, given: str | None, quiet: bool) -> ChatTemplate | None:
    """None, and a note, for a model that has none. Raises UsageError for one that is given and
    cannot be used."""
    from caravan.errors import UsageError
    from caravan.llm.chat import ChatTemplate

    try:
        return ChatTemplate.of(model, given)
    except UsageError as exc:
        if given is not None:
            raise
        if not quiet:
            tell(f"note: no chats: {exc}")
        return None


def _noted(resume: Resume | bool, losses: LossLog) -> Resume | bool:
    """It, with the page's list. Every context tells of a loss; people hear of it once."""
    if isinstance(resume, bool):
        return resume
    on_resume, on_wait = resume.on_resume, resume.on_wait

    def resumed(event: Any) -> None:
        before = losses.count
        losses.on_resume(event)
        if losses.count > before and on_resume is not None:
            on_resume(event)

    def waiting(lost: Any, seconds: float) -> None:
        losses.on_wait(lost, seconds)
        if on_wait is not None:
            on_wait(lost, seconds)

    return replace(resume, on_resume=resumed, on_wait=waiting)


def _url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _is_private(sock: socket.socket) -> bool:
    from caravan.transport.endpoint import is_loopback

    return is_loopback(sock.getsockname()[0])


def _log(method: str, path: str, status: int, seconds: float, client: str) -> None:
    # what a client sends must not move the cursor
    shown = "".join(letter if letter.isprintable() else "?" for letter in path)
    tell(f"{client} {method} {shown} {status} {seconds:.3f} s")


def _tell_error(error: Exception) -> None:
    tell(f"internal error: {type(error).__name__}: {' '.join(str(error).split())}")
    if os.environ.get("CARAVAN_DEBUG", "0") not in ("", "0"):
        import traceback

        traceback.print_exception(error)
