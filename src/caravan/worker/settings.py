"""`Settings`: what the user has asked a worker for.

Made by the command line, read by the supervisor.
"""

from __future__ import annotations

from dataclasses import dataclass

from caravan.transport.certificates import NO_TLS, Tls
from caravan.trust.token import Token


@dataclass(frozen=True, slots=True)
class Settings:
    """What the user asked for.

    Attributes:
        protocol: 7 or 8, or 0 for what the engine speaks.
        extension: offer Caravan's extension.
        timeout: seconds that a client has to introduce itself.
        parent_fd: end when this pipe closes; -1 for none.
        peer_address: where other workers reach this one, as an endpoint; empty: where heads do.
        cache: directory of the weight cache; empty for none.
        cache_size: bytes that it may hold.
        model_dirs: where this machine has GGUF files of its own.
        max_memory: bytes that all sessions together may hold of a device: one limit for each of
            them, or one that holds for each; empty for none.
        token: what heads and other workers have to know; None for nothing.
        tls: the worker's certificate, with which everybody who speaks the extension goes on in TLS,
            and the CA of those that clients have to show.
        insecure: start without a token even where other machines can connect.
        allow_base: let clients of the base protocol come from other machines, too.
        idle_timeout: seconds after which a head of the extension that says nothing is gone; 0: it
            never is.
        drain_seconds: that sessions may go on for after SIGTERM.
    """

    host: str = "127.0.0.1"
    port: int = 50052
    devices: str = ""
    threads: int = 1
    protocol: int = 0
    extension: bool = True
    timeout: float = 10.0
    parent_fd: int = -1
    peer_address: str = ""
    cache: str = ""
    cache_size: int = 0
    model_dirs: tuple[str, ...] = ()
    max_memory: tuple[int, ...] = ()
    token: Token | None = None
    tls: Tls = NO_TLS
    insecure: bool = False
    allow_base: bool = False
    idle_timeout: float = 120.0
    drain_seconds: float = 30.0
    max_sessions: int = 16
    max_connections: int = 256
