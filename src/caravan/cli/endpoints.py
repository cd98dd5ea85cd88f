"""Which workers a command is to use: those of `--rpc`, else those of the environment.

Called by `run` and `bench`, which have the same options for it. Connects to nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from caravan.errors import UsageError
from caravan.transport.endpoint import parse_list

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
