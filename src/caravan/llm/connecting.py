"""`connect`: workers, and devices of this machine, as devices of this process's engine.

The workers behind local devices are started here and end with the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack

from caravan.backend import DEFAULT_POLL, Cluster
from caravan.backend import connect as connect_workers
from caravan.llm.cores import physical_cores, share_of_cores
from caravan.transport.certificates import Tls
from caravan.trust.token import Token
from caravan.worker import names
from caravan.worker.local import LocalDevices, restart


def connect(
    endpoints: Sequence[str],
    *,
    timeout: float = 30.0,
    extension: bool = True,
    direct_copies: bool = True,
    wire_dtype: str = "f32",
    poll: int = DEFAULT_POLL,
    threads: int = 0,
    token: Token | str | None = None,
    tls: Tls | None = None,
    taken: Collection[str] = (),
) -> Cluster:
    """Connect to workers, all at once, and make their devices known to the engine.

    Args:
        endpoints: `HOST:PORT` each (IPv6 in brackets; the port defaults to 50052), `tls://HOST:PORT`
            where nothing goes without TLS, `unix:PATH`, or `local:DEVICE[:THREADS]`, a device of
            this machine behind a worker that is started here.
        timeout: seconds that a worker may be silent while it owes an answer, and that connecting
            may take in all.
        extension: False speaks llama.cpp's plain RPC protocol even with a Caravan worker.
        direct_copies: whether workers that reach each other may copy without passing the head.
        wire_dtype: `f16` or `bf16` let activations travel at half their size, with fewer digits.
        poll: 0...100, how long a thread that waits for a device looks for the answer before it
            sleeps: 0.2 ms for each step, so that short computations are noticed at once.
        threads: of each `local:CPU` that names none; 0: an equal share of the cores.
        token: what workers that ask for one are shown; None: CARAVAN_TOKEN; empty: none.
        tls: the CA of the workers' certificates, without which none is talked to then, and the own
            certificate for those that want to see one. Unix sockets do without.
        taken: names that no device may have.

    Raises:
        UsageError: an endpoint is none or comes twice, or there is none; an unknown type; a level
            of polling that is none; a token that is too short; a file of `tls` that is
            not what it should be.
        WorkerStartError: a local device does not exist.
        ConnectError: a worker cannot be reached or refuses; AuthenticationError if it and this head
            do not know the same token.
        ProtocolError: what answers does not go together with this head.
    """
    local = [text for text in endpoints if names.is_local(text)]
    names.check(local)
    if not local:
        return connect_workers(
            endpoints,
            timeout=timeout,
            extension=extension,
            direct_copies=direct_copies,
            wire_dtype=wire_dtype,
            poll=poll,
            token=token,
            tls=tls,
            taken=taken,
            restart=restart,
        )
    before = [names.PREFIX + names.spec(name) for name in taken if names.is_local(name)]
    with ExitStack() as stack:
        specs = [names.spec(name) for name in local]
        workers = stack.enter_context(LocalDevices(specs, threads or share(local)))
        started = iter(workers.endpoints)
        cluster = connect_workers(
            [next(started) if names.is_local(text) else text for text in endpoints],
            timeout=timeout,
            extension=extension,
            direct_copies=direct_copies,
            wire_dtype=wire_dtype,
            poll=poll,
            token=token,
            tls=tls,
            names=dict(zip(workers.endpoints, _numbered(local, before), strict=True)),
            taken=taken,
            closing=workers.close,
            restart=restart,
        )
        stack.pop_all()
        return cluster


def _numbered(local: list[str], before: list[str]) -> list[str]:
    return names.numbered(before + local)[len(before) :]


def share(local: Sequence[str], others: int = 0) -> int:
    """Threads for each of the local devices that name none, and of `others` workers here."""
    return share_of_cores(physical_cores(), max(1, untold(local) + others))


def untold(local: Sequence[str]) -> int:
    """How many of the local devices must be told how many threads to compute with."""
    return sum(not names.names_threads(name) for name in local)
