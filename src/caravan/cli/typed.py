"""What a user types: lines with history and several of them at once on a terminal, else stdin.

Called by `chat`. Knows nothing of what the lines mean.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from prompt_toolkit.history import History
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent

Typed = Callable[[], str | None]
_PROMPT, _MORE = "> ", "… "


def is_screen() -> bool:
    """Whether somebody sits before it."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def piped() -> str | None:
    """A line of stdin; None at its end."""
    line = sys.stdin.readline()
    return line.removesuffix("\n") if line else None


def on_screen(history: Path | None) -> Typed:
    """What asks on the terminal; None at Ctrl-D, KeyboardInterrupt at a Ctrl-C in an empty line.

    Args:
        history: the file of what was typed before; None: none.
    """
    from prompt_toolkit import PromptSession

    session: PromptSession[str] = PromptSession(
        _PROMPT,
        multiline=True,
        key_bindings=_keys(),
        history=_history(history),
        prompt_continuation=lambda width, number, wrapped: " " * width if wrapped else _MORE,
    )

    def ask() -> str | None:
        try:
            return session.prompt()
        except EOFError:
            return None

    return ask


def history_file() -> Path:
    """Where what was typed in chats is kept: in the user's directory for such things."""
    xdg = os.environ.get("XDG_STATE_HOME", "")
    local = os.environ.get("LOCALAPPDATA", "")
    if os.path.isabs(xdg):
        base = Path(xdg)
    elif sys.platform == "win32" and local:
        base = Path(local)
    elif sys.platform == "darwin":
        base = Path("~/Library/Application Support").expanduser()
    else:
        base = Path("~/.local/state").expanduser()
    return base / "caravan" / "chat-history"


def _history(path: Path | None) -> History:
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    if path is None:
        return InMemoryHistory()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # what was said to a model is nobody else's
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600))
    except OSError as exc:
        click.echo(f"caravan: note: no history: {exc.strerror}: {path}", err=True)
        return InMemoryHistory()
    return FileHistory(path)


def _keys() -> KeyBindings:
    """Enter sends, Alt-Enter or a backslash before Enter begins a new line, Ctrl-C clears all."""
    from prompt_toolkit.key_binding import KeyBindings

    keys = KeyBindings()

    @keys.add("enter")
    def enter(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.text_before_cursor.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("c-c")
    @keys.add("<sigint>")
    def interrupt(event: KeyPressEvent) -> None:
        if event.current_buffer.text:
            event.current_buffer.reset()
        else:
            event.app.exit(exception=KeyboardInterrupt)

    return keys
