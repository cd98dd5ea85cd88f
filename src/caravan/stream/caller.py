"""`Caller`: a head that comes to a worker: it enters, joins a session, and asks why one has ended.

Used by `session`, for each of its connections; knows nothing of devices. What goes wrong is told in
the words of somebody who wanted to connect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from caravan.errors import (
    AuthenticationError,
    CaravanError,
    ConnectError,
    ConnectionClosed,
    ProtocolError,
    RemoteError,
    TransportError,
    TransportTimeout,
)
from caravan.transport.base import Connection
from caravan.transport.certificates import TlsClient
from caravan.transport.endpoint import Endpoint
from caravan.transport.tcp import ENDED, connect
from caravan.trust.entry import Entry
from caravan.trust.token import Token
from caravan.wire import codec, extension
from caravan.wire.commands import Ext
from caravan.wire.extension import (
    NO_DEVICE,
    Asks,
    SessionReply,
    SessionRequest,
    Status,
    TlsRequest,
    public_id,
)
from caravan.wire.versions import check_server

# A session that is just ending is asked for again after so long.
_AGAIN_SECONDS = 0.05
_BUSY = "a busy llama.cpp server, which serves one client at a time"


@dataclass(frozen=True, slots=True)
class Identity:
    """What this head says of itself: its own version, the engine's, and the engine's op names."""

    caravan: str
    engine: str
    ops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who comes to which worker, and with what.

    Attributes:
        timeout: seconds, for connecting and for every later silence.
        token: what is shown to a worker that asks for it; None for none.
        tls: what there is for TLS.
        asked: what the worker has asked for before, and so asks for again.
    """

    endpoint: Endpoint
    identity: Identity
    timeout: float = 30.0
    token: Token | None = None
    tls: TlsClient | None = None
    asked: Asks = Asks.NOTHING

    def enter(self, use_extension: bool = True, session: str = "") -> Entry:
        """A connection on which the next is SESSION, or the first command of the base protocol.

        Args:
            session: the key of the one that is to be joined; empty for a new one.

        Raises as `open_session` does.
        """
        try:
            transport = connect(self.endpoint, self.timeout)
        except ConnectError as exc:
            if isinstance(exc.__cause__, TimeoutError):
                # also with so many waiting for such a server that its system takes no more
                raise ConnectError(f"{exc}: unreachable, or {_BUSY}") from exc
            raise
        entry = Entry(transport, self.endpoint, self.tls)
        try:
            transport.set_timeout(self.timeout)
            self._hello(entry, use_extension)
            require_asked(self.endpoint, self.asked, entry.asks)
            self._satisfy(entry, session)
        except BaseException as exc:
            if entry.extension and isinstance(exc, ProtocolError | ConnectError):
                leave(entry.transport, exc)
            transport.close()
            raise
        return entry

    def _hello(self, entry: Entry, use_extension: bool) -> None:
        endpoint = self.endpoint
        try:
            entry.hello(use_extension)
        except TransportTimeout as exc:
            raise ConnectError(
                f"{endpoint} accepted the connection but did not answer within {self.timeout:g} s:"
                f" perhaps it hangs, or is {_BUSY}"
            ) from exc
        except ConnectionClosed as exc:
            raise ConnectError(f"{endpoint} closed the connection instead of answering") from exc
        entry.version = check_server(entry.version, str(endpoint))

    def _satisfy(self, entry: Entry, session: str) -> None:
        what = "TLS" if Asks.TLS in entry.asks else "a proof"
        request = TlsRequest(session=public_id(session) if session else "")
        with self._telling(
            f"asked for {what} and did not answer in time",
            f"asked for {what} and closed the connection",
            "the connection",
        ):
            entry.satisfy(self.token, request, self.timeout)

    def join(self, entry: Entry, session: str, device: int) -> SessionReply:
        """The SESSION exchange on a connection that may; raises as `open_session` does."""
        request = SessionRequest(session, device, self.identity.caravan, self.identity.engine)
        with self._telling(
            "did not open a session in time",
            "opened no session and closed the connection",
            "a session",
        ):
            entry.transport.set_timeout(self.timeout)
            data = entry.ask(Ext.SESSION, extension.encode_json(request))
        return extension.decode_session_reply(data)

    @contextmanager
    def _telling(self, late: str, closed: str, refused: str) -> Iterator[None]:
        """Say of a step what the worker did instead; the cause stays."""
        try:
            yield
        except TransportTimeout as exc:
            raise ConnectError(f"{self.endpoint} {late}") from exc
        except ConnectionClosed as exc:
            # within TLS the other end says what it did not like
            why = "" if str(exc) == ENDED else f": {exc}"
            raise ConnectError(f"{self.endpoint} {closed}{why}") from exc
        except RemoteError as exc:
            raise ConnectError(f"{self.endpoint} refused {refused}: {exc}") from exc

    def ask_why(self, key: str, deadline: float) -> str:
        """What the worker says of the end of its session `key`; empty if it does not say.

        Args:
            deadline: of time.monotonic.

        Raises CaravanError when it cannot be asked.
        """
        while (left := deadline - time.monotonic()) > 0:
            hurried = replace(self, timeout=left)
            entry: Entry | None = None
            try:
                entry = hurried.enter(session=key)
                if not entry.extension:
                    # another server, which knows nothing of it
                    return ""
                hurried.join(entry, key, NO_DEVICE)
            except ConnectError as exc:
                answer = exc.__cause__
                if isinstance(answer, ConnectionRefusedError | FileNotFoundError):
                    return "the connection closed, and no worker listens there any more"
                if isinstance(answer, RemoteError) and answer.code != Status.BUSY:
                    return answer.text if answer.code == Status.ENDED else ""
                if not isinstance(answer, RemoteError | ConnectionClosed):
                    raise
            finally:
                if entry is not None:
                    entry.transport.close()
            # it has not noticed yet, or is about to end
            time.sleep(_AGAIN_SECONDS)
        return ""


def require_asked(endpoint: object, before: Asks, now: Asks) -> None:
    """Raises AuthenticationError when who answers wants less than the worker that was there before:
    it is let in nowhere, but it would be told what is for that worker alone."""
    for what, words in ((Asks.TOKEN, "a token"), (Asks.TLS, "TLS")):
        if what in before & ~now:
            raise AuthenticationError(
                f"the worker at {endpoint} asked for {words} before, and whoever answers there now"
                " does not: another worker, or somebody in the middle"
            )


def leave(transport: Connection, reason: CaravanError) -> None:
    """Tell the worker, too, why this head does not go together with it."""
    text = str(reason).encode()[: extension.MAX_ERROR_TEXT]
    try:
        transport.send([codec.ext_frame(Ext.BYE, 0, len(text)), text])
    except TransportError:
        return
