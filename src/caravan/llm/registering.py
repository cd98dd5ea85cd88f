"""`register`: workers' devices for the models of another binding in this process.

They are entered in the list of devices of the library that the binding has loaded, from which
llama.cpp takes the devices of a model that names none. The binding knows nothing of it.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Sequence
from types import TracebackType

from caravan import engine, interrupt
from caravan.backend import DEFAULT_POLL, Cluster, RemoteDevice, publish, release
from caravan.engine.layouts import DEVICE_TYPE_CPU
from caravan.errors import UsageError
from caravan.llm.connecting import connect
from caravan.llm.devices import check_room
from caravan.stream.telemetry import DeviceStats
from caravan.transport.certificates import Tls
from caravan.transport.endpoint import Endpoint
from caravan.trust.token import Token
from caravan.worker.names import is_local


class Registration:
    """Workers that a binding's models run on, until it is closed; use it as a context manager.

    Attributes:
        cluster: the connections; its `wire_dtype` and `poll` may be set.
        devices: in the order in which llama.cpp fills them with layers.
        endpoints: the workers' endpoints.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.devices: list[RemoteDevice] = cluster.devices
        self.endpoints: list[str] = cluster.endpoints
        self._guarded = interrupt.guard()

    def __repr__(self) -> str:
        return f"<Registration of {', '.join(self.endpoints)}: {len(self.devices)} devices>"

    def __enter__(self) -> Registration:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def check(self) -> None:
        """Raises WorkerLost once any of the devices is lost, or this is closed.

        Worth a call after a generation: a worker that is lost while the binding waits for logits
        leaves zeros there, and it is the binding's next call that fails.
        """
        self.cluster.check()

    def stats(self) -> dict[str, DeviceStats]:
        """What each device has done so far, by its name; see `Cluster.stats`."""
        return self.cluster.stats()

    def close(self) -> None:
        """Take leave of the workers. Idempotent; done by itself when the interpreter ends.

        Models that are still on the devices are of no further use: the binding's calls fail. Those
        that are loaded later do without the devices.
        """
        with _lock:
            if self not in _open:
                return
            _open.remove(self)
        self.cluster.close()
        if self._guarded:
            interrupt.unguard()


_lock = threading.RLock()
_open: list[Registration] = []
_exits = False
_process = 0


def register(
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
) -> Registration:
    """Connect to workers, and let the models of the binding in this process run on them.

    The binding, such as `llama_cpp`, must have been imported. Each model that it loads from now on
    without naming devices has them all, before local GPUs. Call it on the main thread, so that
    Ctrl-C in the midst of a computation does no harm, and while no other thread loads a model.

    Args:
        endpoints: as for `connect`, and so are the others. Further ones may be registered later.

    Raises what `connect` raises, and
        UsageError: no binding has loaded a llama.cpp library, or there are several; an endpoint is
            registered already; these are more devices than the engine can use.
        AbiMismatch: the binding's library is one that this version of Caravan does not know.
    """
    global _exits, _process
    with _lock:
        loaded = engine.adopt()
        _check_new(endpoints)
        cluster = connect(
            endpoints,
            timeout=timeout,
            extension=extension,
            direct_copies=direct_copies,
            wire_dtype=wire_dtype,
            poll=poll,
            threads=threads,
            token=token,
            tls=tls,
            taken=_names(loaded),
        )
        try:
            # the engine takes all devices that it lists
            check_room(len(cluster.devices), lambda kind: kind != DEVICE_TYPE_CPU)
            registration = Registration(cluster)
        except BaseException:
            cluster.close()
            raise
        _open.append(registration)
        _process = os.getpid()
        if not _exits:
            _exits = True
            atexit.register(_leave)
        publish(cluster.devices)
        return registration


def _check_new(endpoints: Sequence[str]) -> None:
    registered = {endpoint for registration in _open for endpoint in registration.endpoints}
    for text in endpoints:
        if not is_local(text) and str(Endpoint.parse(text)) in registered:
            raise UsageError(f"{text} is registered already: close that registration first")


def _names(loaded: engine.Engine) -> list[str]:
    """Those of all devices that the engine lists; what has once been there keeps its name."""
    ggml = loaded.ggml
    return [ggml.dev_name(device).decode() for device in ggml.devices()]


def _leave() -> None:
    """The interpreter ends. What the binding frees after this must not need it."""
    # a forked child has the connections of its parent, which goes on
    if os.getpid() == _process:
        for registration in list(_open):
            registration.close()
    release()
