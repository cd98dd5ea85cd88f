"""A command on a terminal of 80 columns: what it shows, and keys that are pressed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from e2e.processes import BOUND, alive, command, family, kill, wait_for

# what moves the cursor, colours, and switches modes
_STEERING = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\x1b[=>]|[\r\x08]")
READY = "\x1b[?2004h"


class Terminal:
    """See the module.

    Attributes:
        raw: all that was written to it.
    """

    def __init__(self, process: subprocess.Popen, keyboard: int) -> None:
        self.process = process
        self.raw = ""
        self._keyboard = keyboard
        self._seen = 0
        self._family: set[int] = set()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        # the last program that has it open ends it with an error
        with contextlib.suppress(OSError):
            while data := os.read(self._keyboard, 4096):
                self.raw += data.decode("utf-8", "replace")

    @property
    def text(self) -> str:
        return _STEERING.sub("", self.raw)

    def press(self, keys: str) -> None:
        os.write(self._keyboard, keys.encode())

    def shows(self, text: str) -> None:
        """Wait until something new has it."""
        wait_for(lambda: text in self.raw[self._seen :])
        self._seen = self.raw.index(text, self._seen) + len(text)

    def say(self, line: str) -> None:
        """Wait for a prompt, and type a line."""
        self.shows(READY)
        self.press(line + "\r")

    def finish(self) -> int:
        """Its exit code; everything that it started has ended too."""
        self._family.update(family(self.process.pid))
        code = self.process.wait(BOUND)
        wait_for(lambda: not any(map(alive, self._family)), 10.0)
        return code

    def close(self) -> None:
        self._family.update(family(self.process.pid))
        for pid in (self.process.pid, *self._family):
            if alive(pid):
                kill(pid)
        self.process.wait(BOUND)
        self._reader.join(BOUND)
        os.close(self._keyboard)


@contextmanager
def terminal(*arguments: str, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """A command in the foreground of a terminal, which answers no questions about itself."""
    keyboard, screen = pty.openpty()
    fcntl.ioctl(screen, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    own = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1", **environment}
    # `setsid -c` makes it the terminal that Ctrl-C comes from, without code between fork and exec
    process = subprocess.Popen(
        ["setsid", "-c", *command(*arguments)],
        stdin=screen,
        stdout=screen,
        stderr=screen,
        env=own,
    )
    os.close(screen)
    started = Terminal(process, keyboard)
    try:
        yield started
    finally:
        started.close()
