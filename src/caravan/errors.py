"""Every error that Caravan raises, in one hierarchy under `CaravanError`.

All floors raise these and nothing else for a condition that a user can meet; the command line turns
any of them into one line on stderr and exit code 1. This module imports nothing of the package.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any


class CaravanError(Exception):
    """Base of all errors of this package; `str()` of it is one line fit for a user."""


class UsageError(CaravanError):
    """A value given by the caller cannot be meant (a bad endpoint, split, device name)."""


class NoConversations(UsageError):
    """The model continues no texts; it may make vectors of them."""


class QueueFull(CaravanError):
    """More requests wait than may.

    Attributes:
        retry_after: seconds after which it may be worth another try.
    """

    def __init__(self, text: str, retry_after: float) -> None:
        super().__init__(text)
        self.retry_after = retry_after


# engine


class EngineError(CaravanError):
    """The engine (ggml, llama) refused a call."""


class EngineNotFound(EngineError):
    """No engine library could be found or loaded."""


class AbiMismatch(EngineError):
    """The engine's internal layouts are not the ones this version of Caravan knows."""


class ModelError(EngineError):
    """The model file is missing, is not GGUF, or the engine cannot load it."""


class ContextError(EngineError):
    """The engine could not make a context (often: not enough memory on a device)."""


class DoesNotFit(ModelError, ContextError):
    """A device has not the memory that a model or a context needs, which was seen beforehand.

    Attributes:
        needs: what each device needs and has free (`caravan.llm.Needs`).
        suggestions: what would fit instead (`caravan.llm.Suggestion`), most useful first.
    """

    def __init__(self, text: str, needs: Any = None, suggestions: Sequence[Any] = ()) -> None:
        super().__init__(text)
        self.needs = needs
        self.suggestions = list(suggestions)


class DecodeError(EngineError):
    """The engine could not process a batch."""


class StateError(EngineError):
    """A conversation cannot be saved, or what was saved is of no use here: another model or other
    formats, a file that is cut off."""


class SamplingError(EngineError):
    """No token can be chosen: none is allowed, or the logits are not numbers."""


class NothingAllowed(SamplingError):
    """Grammar and biases leave no token, or the grammar is ambiguous: whoever gave them can change
    that."""


# wire and transport


class ProtocolError(CaravanError):
    """A peer, or our own caller, broke the rules of the wire."""


class LocalProtocolError(ProtocolError):
    """Our own side asked for something that the wire cannot carry."""


class RemoteProtocolError(ProtocolError):
    """The peer sent bytes that mean nothing, or of the wrong length."""


class VersionMismatch(ProtocolError):
    """The two ends speak protocol versions that do not go together."""


class TransportError(CaravanError):
    """Bytes could not be moved."""


class ConnectError(TransportError):
    """No connection: the host is unknown, the port refuses, or nobody answered in time."""


class AuthenticationError(ConnectError):
    """A worker and its client do not know the same token, or one of them knows none."""


class ConnectionClosed(TransportError):
    """The peer closed the connection, or it broke."""


class SessionEnded(ConnectionClosed):
    """The connection closed because the worker's session process ended; the worker says why."""


class LinkDamaged(ConnectionClosed):
    """What came by TLS is not what was sent, so the connection was ended."""


class TransportTimeout(TransportError):
    """The peer was silent for longer than the bound."""


# devices and workers


class DeviceError(CaravanError):
    """A device refused a command."""


class AllocationError(DeviceError):
    """A device has no room for a buffer."""


class RemoteError(CaravanError):
    """The worker answered a command with an error.

    Attributes:
        code: the wire's status code (`wire.extension.Status`).
        text: the worker's own words.
    """

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class WorkerLost(CaravanError):
    """A stream to a worker's device failed; everything that it held is gone.

    Attributes:
        endpoint: `HOST:PORT` of the worker.
        device: the device's name on this head, such as `RPC0`.
        command: the command that met the failure, or what the head was waiting for.
        cause: the first error, also set as `__cause__` by the raiser; `SessionEnded` once the
            worker has said why its session process ended.
        outcome: what came of going on without it, where that was tried.
    """

    def __init__(
        self, endpoint: str, device: str, command: str, cause: BaseException, *, outcome: str = ""
    ) -> None:
        super().__init__(endpoint, device, command, cause)
        self.endpoint = endpoint
        self.device = device
        self.command = command
        self.cause = cause
        self.outcome = outcome
        # set while somebody asks the worker what happened
        self._asked: threading.Event | None = None

    def __str__(self) -> str:
        text = f"lost {self.device} at {self.endpoint} during {self.command}: {self.cause}"
        return f"{text}; {self.outcome}" if self.outcome else text

    def but(self, outcome: str) -> WorkerLost:
        """This loss, and what came of trying to go on."""
        told = WorkerLost(self.endpoint, self.device, self.command, self.cause, outcome=outcome)
        told.__cause__ = self.cause
        return told

    def ask(self) -> None:
        """Somebody is about to ask the worker what happened: `explain` follows in any case."""
        if self._asked is None:
            self._asked = threading.Event()

    def explain(self, cause: BaseException | None) -> None:
        """What happened, which the connection could not tell; None: that is not known."""
        if cause is not None:
            cause.__cause__ = self.cause
            self.cause = self.__cause__ = cause
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.set()

    def settle(self, seconds: float = 1.5) -> None:
        """Wait until it is explained if that is to come, `seconds` at most."""
        asked = self._asked
        if asked is not None:
            asked.wait(seconds)


class WorkerStartError(CaravanError):
    """A worker could not start: the port is taken, a device is unknown."""


class ServerStartError(CaravanError):
    """The HTTP server could not start: the port is taken, the address is not of this machine."""


# models on disk


class DownloadError(CaravanError):
    """A sample model could not be fetched, or what came is not what was expected."""
