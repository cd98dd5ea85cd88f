"""`TextStream`: bytes of tokens to text, whole characters only, and where a stop text ends it."""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class TextStream:
    """See the module.

    Args:
        stop: texts that end it.

    Attributes:
        stopped: a text of `stop` has come; it and what follows are left out.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = [text for text in stop if text]
        self._held = ""
        self.stopped = False

    def feed(self, data: bytes) -> str:
        """What is text for certain now; may be empty."""
        if self.stopped:
            return ""
        self._held += self._decoder.decode(data)
        # that which is complete first, of several the longest: so it does not matter how it is cut
        found = ((at + len(text), at) for text in self._stop if (at := self._held.find(text)) >= 0)
        _, at = min(found, default=(0, -1))
        if at >= 0:
            self.stopped = True
            return self._held[:at]
        keep = max((self._overlap(text) for text in self._stop), default=0)
        ready = self._held[: len(self._held) - keep]
        self._held = self._held[len(ready) :]
        return ready

    def _overlap(self, stop: str) -> int:
        """How many characters at the end may be the beginning of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    def finish(self) -> str:
        """The rest; bytes that are no character become one that says so."""
        return "" if self.stopped else self._held + self._decoder.decode(b"", True)
