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


def spoken() -> str:
    """What we speak, with the releases."""
    return " and ".join(f"{version} ({RELEASES[version.major]})" for version in SPOKEN)


def check_server(peer: Version, endpoint: str) -> Version:
    """The version to speak with a server that announced `peer`; raises VersionMismatch."""
    for version in SPOKEN:
        if peer.major == version.major and peer.minor <= version.minor:
            return version
    age = "a newer" if peer > SPOKEN[-1] or peer.major == V7.major else "an older"
    raise VersionMismatch(
        f"{endpoint} speaks RPC protocol {peer} ({age} llama.cpp); this head speaks {spoken()}."
        " Run a server of one of these releases there, or `caravan worker`."
    )


def left_after_hello(announced: Version) -> str:
    """Why a client may have left when it heard what a worker speaks, and what to do."""
    others = " or ".join(
        f"--protocol {version.major} for one of {version} ({RELEASES[version.major]})"
        for version in SPOKEN
        if version != announced
    )
    return (
        "it left after HELLO. llama.cpp's programs do that when the versions do not go together:"
        f" this worker speaks RPC protocol {announced} ({RELEASES[announced.major]});"
        f" start it with {others}"
    )
