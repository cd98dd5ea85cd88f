"""Endpoints as people write them: `host:port`, `[v6]:port`, `host`, `tls://host`, `unix:/path`.

Parsed once, here; the port defaults to llama.cpp's 50052.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from caravan.errors import UsageError

DEFAULT_PORT = 50052
TLS = "tls://"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a worker listens: a TCP host and port, or the path of a Unix socket.

    Attributes:
        tls: nobody is talked to there without TLS.
    """

    host: str
    port: int
    path: str = ""
    tls: bool = False

    def __str__(self) -> str:
        if self.path:
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{TLS if self.tls else ''}{host}:{self.port}"

    @property
    def is_here(self) -> bool:
        """Whether it names a place on whatever machine looks it up."""
        return bool(self.path) or self.host == "localhost" or is_loopback(self.host)

    @staticmethod
    def parse(text: str, default_port: int = DEFAULT_PORT) -> Endpoint:
        """Raises UsageError when `text` is no endpoint."""
        text = text.strip()
        if text.startswith("unix:"):
            if len(text) == 5:
                raise UsageError("endpoint 'unix:' names no path")
            return Endpoint("", 0, text[5:])
        if text.startswith(TLS):
            if text.startswith(f"{TLS}unix:"):
                raise UsageError(f"endpoint {text!r}: there is no TLS on Unix sockets")
            return replace(_parse_tcp(text[len(TLS) :], default_port), tls=True)
        return _parse_tcp(text, default_port)


def _parse_tcp(text: str, default_port: int) -> Endpoint:
    if text.startswith("["):
        host, bracket, rest = text[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise UsageError(f"endpoint {text!r}: expected [IPV6]:PORT")
        port_text = rest[1:] if rest else ""
    elif text.count(":") > 1:
        if not _is_ipv6(text):
            raise UsageError(f"endpoint {text!r}: expected HOST:PORT or [IPV6]:PORT")
        return Endpoint(text, default_port)
    else:
        host, _, port_text = text.partition(":")
    if not host or any(c.isspace() for c in host):
        raise UsageError(f"endpoint {text!r} names no host: expected HOST:PORT")
    return Endpoint(host, _port(text, port_text, default_port))


def is_loopback(address: str) -> bool:
    """Whether an address, in numbers, is one that only its own machine can use."""
    try:
        number = ipaddress.ip_address(address)
    except ValueError:
        return False
    mapped = getattr(number, "ipv4_mapped", None)
    return (number if mapped is None else mapped).is_loopback


def _is_ipv6(text: str) -> bool:
    return set(text.partition("%")[0]) <= set("0123456789abcdefABCDEF:.")


def _port(text: str, port_text: str, default_port: int) -> int:
    if not port_text:
        if text.endswith(":"):
            raise UsageError(f"endpoint {text!r} names no port after ':'")
        return default_port
    # the length first: int() refuses very long digits with an error of its own
    digits = port_text.isascii() and port_text.isdigit() and len(port_text) <= 5
    if not (digits and 0 < int(port_text) < 65536):
        raise UsageError(f"endpoint {text!r}: port {port_text!r} is not in 1..65535")
    return int(port_text)


def parse_list(text: str) -> list[Endpoint]:
    """The endpoints of `--rpc a:p,b:p`; raises UsageError, also for an empty list."""
    parts = [part for part in text.split(",") if part.strip()]
    if not parts:
        raise UsageError("no endpoint given: expected HOST:PORT[,HOST:PORT…]")
    return [Endpoint.parse(part) for part in parts]
