"""`Connection`: one worker of a cluster and its devices, with a new session after each loss.

A device is the same to the engine for as long as its cluster lives; what changes is the link that
it goes by. Owned by `cluster`; whoever wants to go on after a loss calls `reopen`. Knows nothing of
models: what lay on the devices is theirs to put there again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from caravan.backend.device import RemoteDevice
from caravan.errors import ProtocolError, UsageError, WorkerLost
from caravan.stream.caller import require_asked
from caravan.stream.link import DeviceLink
from caravan.stream.session import Session

# Seconds for the threads of a session that is lost: they have nothing to wait for.
_LOST_SECONDS = 1.0


class Connection:
    """See the module. `reopen` may be called on several threads.

    Args:
        session: the first one.
        open_one: opens another one with the same worker.
        restart: called before that; starts the worker where that is ours to do.

    Attributes:
        endpoint: of the worker.
        session: the present one.
        devices: in the order of the session's links.
    """

    def __init__(
        self,
        session: Session,
        open_one: Callable[[], Session],
        restart: Callable[[str], None] = lambda endpoint: None,
    ) -> None:
        self.endpoint = str(session.endpoint)
        self.session = session
        self.devices: list[RemoteDevice] = []
        self._open_one = open_one
        self._restart = restart
        self._reopening = threading.Lock()
        # held for a moment only, so that `close` waits for nobody who connects
        self._changing = threading.Lock()
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "lost" if self.lost else "open"
        return f"<Connection to {self.endpoint}: {len(self.devices)} devices, {state}>"

    @property
    def lost(self) -> WorkerLost | None:
        """Why the session is of no use, if one of its streams is of none: it ends as a whole."""
        losses = (link.stream.failure for link in self.session.links)
        return next((loss for loss in losses if loss is not None), None)

    def adopt(self, devices: list[RemoteDevice]) -> None:
        """Take the devices for those of the session's links."""
        self.devices = devices
        for device in devices:
            device.connection = self
        _name_streams(self.session.links, devices)

    def reopen(self) -> None:
        """Have a session again, if the one that there was is lost. Blocks, as connecting does.

        Raises ConnectError and WorkerStartError where there is nobody (yet), AuthenticationError
        and ProtocolError where there is somebody else, or the same worker with other devices or
        with a door that stands open now; and UsageError if the cluster
        was closed, or if the devices were entered in the engine's own list: nobody could tell those
        who use them there.
        """
        with self._reopening:
            lost = self.lost
            if lost is None:
                return
            self._require_open()
            if any(device.published for device in self.devices):
                raise UsageError(f"{self.endpoint}: registered devices do not come back")
            self._leave(lost)
            self._restart(self.endpoint)
            session = self._open_one()
            try:
                self._require_same(session)
                self._install(session)
            except BaseException:
                session.close()
                raise

    def _leave(self, lost: WorkerLost) -> None:
        """Let go of what is left of the old session, so that its worker frees what it held."""
        for link in self.session.links:
            link.stream.fail(lost, lost.command)
        self.session.close(time.monotonic() + _LOST_SECONDS)

    def _require_same(self, session: Session) -> None:
        # nothing has gone there yet that is for nobody else
        require_asked(self.endpoint, self.session.asks, session.asks)
        came = f"the worker at {self.endpoint} came back with"
        old, new = self.session.links, session.links
        if session.engine != self.session.engine:
            raise ProtocolError(
                f"{came} ggml {session.engine or 'unknown'} instead of"
                f" {self.session.engine or 'unknown'}"
            )
        if len(new) != len(old):
            raise ProtocolError(f"{came} {len(new)} devices instead of {len(old)}")
        for device, before, now in zip(self.devices, old, new, strict=True):
            if _kind(before) != _kind(now):
                raise ProtocolError(
                    f"{came} another device for {device.name}: {_described(now)} instead of"
                    f" {_described(before)}"
                )

    def _install(self, session: Session) -> None:
        with self._changing:
            self._require_open()
            self.session = session
            _name_streams(session.links, self.devices)
            for device, link in zip(self.devices, session.links, strict=True):
                device.renew(link)

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(f"{self.endpoint}: the cluster was closed")

    def close(self, deadline: float) -> None:
        """Take leave; see `Session.close`. A session that is being opened is closed then."""
        with self._changing:
            self._closed = True
        self.session.close(deadline)


def _kind(link: DeviceLink) -> tuple[object, ...]:
    """What must be the same for the engine to go on with a device as if nothing had been."""
    info = link.info
    return (
        link.extension,
        info.name,
        info.type,
        info.description,
        info.memory_total,
        info.alignment,
        info.pads,
    )


def _described(link: DeviceLink) -> str:
    info = link.info
    return f"{info.description} with {info.memory_total >> 20} MiB"


def _name_streams(links: list[DeviceLink], devices: list[RemoteDevice]) -> None:
    """Devices that share a connection are lost together."""
    for link in links:
        shared = [
            device.name
            for device, other in zip(devices, links, strict=True)
            if other.stream is link.stream
        ]
        link.stream.device = ",".join(shared)
