"""`Steps`: tells people now and then what is being done, where all of it takes long.

Called by `auto` and the command line while devices are measured.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from caravan import interrupt

_PATIENCE = 1.0  # seconds between two lines, and before the first


class Steps:
    """See the module. Use it as a context manager, and call it with each step.

    Args:
        say: told a line, on a thread of its own.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._line = self._told = ""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="caravan-steps", daemon=True)

    def __enter__(self) -> Steps:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._thread.join()

    def __call__(self, line: str) -> None:
        """This is done from now on; on any thread. Raises KeyboardInterrupt after Ctrl-C where that
        is held back."""
        if interrupt.pending():
            raise KeyboardInterrupt
        self._line = line

    def _watch(self) -> None:
        while not self._over.wait(_PATIENCE):
            line = self._line
            if line != self._told:
                self._told = line
                self._say(f"{line} …")
