"""Which workers and devices a command is to use: `--rpc`, else the environment; `--device`.

Called by all commands that have these options. Connects to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from caravan.cli.tls_options import of_head
from caravan.cli.tokens import token_of
from caravan.errors import UsageError
from caravan.transport.endpoint import parse_list
from caravan.worker import names

if TYPE_CHECKING:
    from caravan.llm.opening import Workers

_VARIABLES = ("CARAVAN_RPC", "LLAMA_ARG_RPC")


def endpoints(rpc: Sequence[str], local_workers: int) -> tuple[str, ...]:
    """The endpoints of all `--rpc`; without any, and without local workers, the environment's.

    A variable that is empty or blank is as good as not set. Raises UsageError for an option that
    is, for what is no endpoint, and for `--rpc` together with `--local-workers`.
    """
    if rpc and local_workers:
        raise UsageError("--rpc and --local-workers exclude each other")
    if not rpc and not local_workers:
        set_ones = filter(str.strip, (os.environ.get(name, "") for name in _VARIABLES))
        rpc = list(set_ones)[:1]
    return tuple(str(endpoint) for text in rpc for endpoint in parse_list(text))


def workers_of(options: dict[str, Any], **more: Any) -> Workers:
    """The workers that these options want; `more` is what only some commands can say of them.

    Raises UsageError.
    """
    given = endpoints(options["rpc"], options["local_workers"])
    token = token_of(options["token_file"])
    tls = of_head(options)

    from caravan.llm.opening import Workers

    return Workers(
        given,
        local_workers=options["local_workers"],
        threads=options["threads"],
        timeout=options["timeout"],
        direct_copies=not options["no_direct_copies"],
        token=token,
        tls=tls,
        **more,
    )


def device_list(text: str) -> list[str]:
    """The devices of `--device`, joined by `,` or `/`; raises UsageError."""
    if not text.strip():
        return []
    found = names.split(text, ",/")
    if not all(found):
        raise UsageError(f"--device {text!r} holds an empty device name")
    if len(found) > 1 and "none" in found:
        raise UsageError(f"--device {text!r}: none stands alone")
    try:
        names.check(found)
    except UsageError as exc:
        raise UsageError(f"--device: {exc}") from None
    return found
