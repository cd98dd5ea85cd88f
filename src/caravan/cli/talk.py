"""`Talk`: a conversation line by line: what is said, the answers, and commands that begin with `/`.

Called by `chat`, which says where lines come from and where the model runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from caravan.cli.head import tell
from caravan.cli.streamed import Streamed
from caravan.errors import CaravanError, DecodeError, UsageError, WorkerLost

if TYPE_CHECKING:
    from caravan.llm import Chat

COMMANDS = {
    "/help": "show this",
    "/save FILE": "keep the conversation in a file",
    "/load FILE": "go on with one that was kept",
    "/stats": "show tokens and speeds",
    "/clear": "forget all but the system prompt",
    "/system [TEXT]": "show the system prompt, or say another one",
    "/regen": "another answer to what was said last",
    "/exit": "end; Ctrl-D too",
}
_HINT = "(Ctrl-C once more ends, Ctrl-D too)"


class Talk:
    """See the module.

    Args:
        chat: the conversation.
        out: where answers go.
        screen: somebody sits before it: an error is told, and it goes on.
        quiet: no notes.
    """

    def __init__(self, chat: Chat, out: Streamed, *, screen: bool, quiet: bool = False) -> None:
        self._chat = chat
        self._out = out
        self._screen = screen
        self._quiet = quiet
        self._n_prompt = self._n_gen = self._n_answers = self._n_lost = 0

    def run(self, read: Callable[[], str | None]) -> None:
        """Until there is no more to read, or `/exit`.

        Raises KeyboardInterrupt for Ctrl-C where nobody sits before it, and CaravanError for what
        ends it.
        """
        pressed = False
        while True:
            try:
                line = read()
            except KeyboardInterrupt:
                if pressed or not self._screen:
                    if self._screen:
                        return
                    raise
                pressed = True
                click.echo(_HINT, err=True)
                continue
            pressed = False
            if line is None or not self.take(line):
                return

    def take(self, line: str) -> bool:
        """What one line says; False: it is the end."""
        text = line.strip()
        word, rest = (*text.split(None, 1), "", "")[:2]
        if word == "/exit":
            return False
        try:
            if text.startswith("//"):
                # a text that begins with /
                self._answer(lambda: self._chat.say(text[1:]))
            elif text.startswith("/"):
                self._command(word, rest)
            elif text:
                self._answer(lambda: self._chat.say(text))
        except KeyboardInterrupt:
            if not self._screen:
                raise
            self._out.break_line()
            self._note("stopped")
        except CaravanError as exc:
            self._out.end_line()
            if not self._screen or self._is_over(exc):
                raise
            # most often there is no room left
            hint = "; /clear begins anew" if isinstance(exc, DecodeError) else ""
            tell(f"error: {exc}{hint}")
        return True

    def _is_over(self, exc: CaravanError) -> bool:
        """Whether nothing can come after it; what was lost may be back when it is next used."""
        return isinstance(exc, WorkerLost) and self._chat.context.resume is None

    def _command(self, word: str, rest: str) -> None:
        commands: dict[str, Callable[[str], None]] = {
            "/help": lambda rest: self._help(),
            "/save": self._save,
            "/load": self._load,
            "/stats": lambda rest: self._stats(),
            "/clear": lambda rest: self._clear(),
            "/system": self._system,
            "/regen": lambda rest: self._answer(self._chat.again),
        }
        if word not in commands:
            raise UsageError(f"there is no {word}; /help shows what there is")
        commands[word](rest)

    def _note(self, text: str) -> None:
        if not self._quiet:
            tell(text)

    # answers

    def _answer(self, begin: Callable[[], Iterator[str]]) -> None:
        pieces = begin()
        try:
            for piece in pieces:
                self._out.write(piece)
        finally:
            close = getattr(pieces, "close", None)
            if close is not None:
                close()
            self._count()
        self._end()

    def _count(self) -> None:
        stats = self._chat.stats
        self._n_answers += 1
        self._n_prompt += stats.n_prompt
        self._n_gen += stats.n_gen
        self._n_lost += len(stats.resumes)

    def _end(self) -> None:
        if self._screen:
            self._out.end_line()
        else:
            self._out.write("\n")
        stopped = self._chat.stats.stopped
        if stopped == "length":
            self._note(f"note: ended after {self._chat.stats.n_gen} tokens (-n)")
        elif stopped == "context":
            self._note("note: ended: the context is full; /clear begins anew, -c makes it larger")
        if self._screen:
            click.echo()

    # commands

    def _help(self) -> None:
        for command, text in COMMANDS.items():
            click.echo(f"{command:<16}{text}", err=True)
        click.echo(
            "Alt-Enter or \\ before Enter begins a new line; // says a text with /.", err=True
        )

    def _save(self, name: str) -> None:
        from caravan.llm.statefile import Saved

        path = _path(name, "/save")
        if not Saved.may_replace(path):
            raise UsageError(f"{path} is something else, and stays")
        self._chat.save(path)
        self._note(f"{self._size()} are in {path}")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        whole = self._chat.load(path)
        again = "" if whole else "; they will be read again, for this model in these formats"
        self._note(f"{self._size()}{again}")

    def _size(self) -> str:
        messages, tokens = len(self._chat.messages), self._chat.context.n_past
        return f"{messages} message{'s' * (messages != 1)}, {tokens} tokens"

    def _clear(self) -> None:
        self._chat.clear()
        self._note("all is forgotten")

    def _system(self, text: str) -> None:
        if text:
            self._chat.system = text
            self._note("the system prompt is another one")
        else:
            click.echo(self._chat.system or "(none of yours; the template may have one)", err=True)

    def _stats(self) -> None:
        context, stats = self._chat.context, self._chat.stats
        lines = [f"context: {context.n_past} of {context.n_ctx} tokens"]
        if self._n_answers:
            lines += [
                f"last answer: {stats.n_prompt} tokens read, {stats.prompt_rate:.2f} t/s;"
                f" {stats.n_gen} written, {stats.decode_rate:.2f} t/s",
                f"all {self._n_answers} answers: {self._n_prompt} tokens read,"
                f" {self._n_gen} written",
            ]
        if self._n_lost:
            lines.append(f"losses of workers: {self._n_lost}")
        click.echo("\n".join(lines), err=True)


def _path(name: str, command: str) -> Path:
    if not name:
        raise UsageError(f"{command} needs the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as exc:
        raise UsageError(f"{command}: {exc}") from exc
