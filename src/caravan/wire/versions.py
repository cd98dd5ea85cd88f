"""Protocol versions: which go together, which release speaks which, and how to say so.

llama.cpp's rule, applied by the side that connects: equal major, and the peer's minor not newer.
"""

from __future__ import annotations

from typing import NamedTuple

from caravan.errors import VersionMismatch


class Version(NamedTuple):
    """A version of the base protocol."""

    major: int
    minor: int
    patch: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}.{self.patch}"


V7 = Version(7, 0, 0)
V8 = Version(8, 0, 0)
SPOKEN = (V7, V8)
RELEASES = {7: "ggml 0.25.x, llama-cpp-python 0.3.36", 8: "ggml 0.26.x, llama.cpp b11549"}


def check_server(peer: Version, endpoint: str) -> Version:
    """The version to speak with a server that announced `peer`; raises VersionMismatch."""
    for version in SPOKEN:
        if peer.major == version.major and peer.minor <= version.minor:
            return version
    spoken = " and ".join(f"{v} ({RELEASES[v.major]})" for v in SPOKEN)
    raise VersionMismatch(
        f"{endpoint} speaks RPC protocol {peer}; this head speaks {spoken}. "
        "Run a worker of one of these releases there, or `caravan worker`."
    )
