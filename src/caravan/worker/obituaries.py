"""`Obituaries`: why a worker's last sessions ended, for their heads, which come back and ask.

Belongs to the supervisor. It keeps no keys, only their public names, and of the newest sessions.
"""

from __future__ import annotations

from collections import OrderedDict

from caravan.wire.extension import public_id

# Sessions that are remembered; a head asks within a second of the end.
MOST = 256


class Obituaries:
    """See the module."""

    def __init__(self) -> None:
        self._texts: OrderedDict[str, str] = OrderedDict()

    def __repr__(self) -> str:
        return f"<Obituaries of {len(self._texts)} sessions>"

    def note(self, key: str, text: str) -> None:
        """The session of this key has ended, and why."""
        self._texts[public_id(key)] = text
        while len(self._texts) > MOST:
            self._texts.popitem(last=False)

    def find(self, public: str) -> str:
        """Why the session of this public name has ended; nothing if it is not known."""
        return self._texts.get(public, "")
