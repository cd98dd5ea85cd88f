"""The options for TLS that `worker`, `run`, `devices` and `bench` have in common."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import click

from caravan.transport.certificates import Tls, client_context

_F = TypeVar("_F", bound=Callable[..., object])

_VARIABLES = {"ca": "CARAVAN_TLS_CA", "cert": "CARAVAN_TLS_CERT", "key": "CARAVAN_TLS_KEY"}


def tls_options(*, ca: str, cert: str, key: str, metavar: str = "FILE") -> Callable[[_F], _F]:
    """`--tls-ca`, `--tls-cert` and `--tls-key`, with these help texts."""
    texts = {"ca": ca, "cert": cert, "key": key}

    def decorate(function: _F) -> _F:
        for name in reversed(texts):
            option = click.option(f"--tls-{name}", default="", metavar=metavar, help=texts[name])
            function = option(function)
        return function

    return decorate


HEAD = {
    "ca": "CA of the workers' certificates (ca.pem of caravan tls); no worker is then talked to"
    " without TLS.  [default: $CARAVAN_TLS_CA]",
    "cert": "Certificate for workers that want to see one.  [default: $CARAVAN_TLS_CERT]",
    "key": "Its private key.  [default: $CARAVAN_TLS_KEY]",
}


def given(options: dict[str, Any]) -> Tls:
    """What the options say, the paths absolute; raises UsageError for half a pair."""
    names = [str(options[f"tls_{name}"]) for name in _VARIABLES]
    return Tls(*(os.path.abspath(name) if name else "" for name in names))


def of_head(options: dict[str, Any]) -> Tls:
    """The same, where an option that is not given is as the environment says.

    Certificate and key are one pair: if either is given, neither comes from the environment.
    Raises UsageError also for a file that is not what it should be.
    """
    filled = dict(options)
    pair_given = options["tls_cert"] or options["tls_key"]
    for name, variable in _VARIABLES.items():
        if not filled[f"tls_{name}"] and (name == "ca" or not pair_given):
            filled[f"tls_{name}"] = os.environ.get(variable, "").strip()
    tls = given(filled)
    if tls:
        client_context(tls)
    return tls
