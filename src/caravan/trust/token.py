"""`Token`: the secret that a worker and its heads share, and where it is read from.

A file, the environment, or the caller of the Python interface; never the command line, which
everybody on the machine can read. No text or error that is made here shows any of it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable
from typing import NoReturn

from caravan.errors import UsageError

VARIABLE = "CARAVAN_TOKEN"
# Whoever a head connects to can try tokens on what it shows, as fast as computers are.
MIN_LENGTH = 16
_MAX_BYTES = 4096
_RANDOM_BYTES = 32


class Token:
    """A shared secret; shows itself to nobody.

    Args:
        text: at least 16 characters on one line; blanks around them do not count.
        source: where it comes from, for errors.

    Raises UsageError, which does not repeat the text.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str, source: str = "the token") -> None:
        text = text.strip()
        if not text:
            raise UsageError(f"{source} is empty")
        if not text.isprintable():
            raise UsageError(f"{source} is not one line of plain text")
        if len(text) < MIN_LENGTH:
            raise UsageError(
                f"{source} is too short: expected at least {MIN_LENGTH} characters"
                " (caravan token new makes one)"
            )
        self._key = text.encode()

    def __repr__(self) -> str:
        return "<Token>"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a token is not written down")

    @property
    def key(self) -> bytes:
        """What the proof is made with: its text in UTF-8."""
        return self._key


def new() -> str:
    """The text of a new token: 256 random bits, in letters that need no quotes anywhere."""
    return secrets.token_urlsafe(_RANDOM_BYTES)


def read(path: str | os.PathLike[str], warn: Callable[[str], None] = lambda text: None) -> Token:
    """The token in a file.

    Args:
        warn: told when others on this machine can read the file.

    Raises UsageError when it cannot be read, or holds none.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            info = os.fstat(file.fileno())
            data = file.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise UsageError(f"cannot read the token file {name}: {reason}") from exc
    if len(data) > _MAX_BYTES:
        raise UsageError(f"the token file {name} holds more than {_MAX_BYTES} bytes, so no token")
    token = Token(_decode(data, f"the token file {name}"), f"the token in {name}")
    if stat.S_ISREG(info.st_mode) and info.st_mode & (stat.S_IRGRP | stat.S_IROTH):
        warn(f"others on this machine can read the token file {name}: chmod 600 it")
    return token


def from_environment() -> Token | None:
    """The token in CARAVAN_TOKEN; None when it is not set, or blank. Raises UsageError."""
    text = os.environ.get(VARIABLE, "")
    if not text.strip():
        return None
    return Token(_decode(os.fsencode(text), VARIABLE), f"the token in {VARIABLE}")


def given(token: Token | str | None) -> Token | None:
    """The token that a caller means: a text, an empty one for none, or None: the environment's.

    Raises UsageError.
    """
    if token is None:
        return from_environment()
    if isinstance(token, str):
        return Token(token) if token else None
    if not isinstance(token, Token):
        raise UsageError(f"the token is of type {type(token).__name__}: expected a text")
    return token


def _decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        # neither the error nor its cause may show what is there
        raise UsageError(f"{source} is not text in UTF-8") from None
