"""From Python to C and back nothing: wraps functions for the slots of ggml's plug-in structs.

No exception leaves a callback: it loses the stream of the device concerned (so that the failure
shows where the engine can hear it) and the slot's harmless answer is returned. Wrapped functions
live as long as the process, since C keeps their addresses.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from caravan import interrupt
from caravan.errors import CaravanError
from caravan.trace import head

if TYPE_CHECKING:
    from caravan.backend.device import RemoteDevice
    from caravan.stream.link import DeviceLink

_KEEP: list[Any] = []
# Callbacks that only look something up: a timeline would have thousands of them, of a microsecond
# each, and recording them would take longer than they do.
_LOOKUPS = frozenset(
    (
        "get_alignment",
        "get_base",
        "get_buffer_type",
        "get_description",
        "get_max_size",
        "get_name",
        "get_type",
        "is_host",
        "supports_buft",
        "supports_op",
    )
)
# which argument of a callback is a number of bytes
_SIZES = {
    "buffer_type.alloc_buffer": 1,
    "buffer.set_tensor": 4,
    "buffer.get_tensor": 4,
    "backend.set_tensor_async": 4,
    "backend.get_tensor_async": 4,
}

# Devices by the address of each struct that a callback may be given first: their own, and those of
# their buffer types, buffers, backends and events. Filled and emptied by the owners of the structs.
owners: dict[int, RemoteDevice] = {}
# The links of buffers and backends. A device that was lost and came back has another one.
links: dict[int, DeviceLink] = {}


class Counter:
    """Callbacks since the start, where `count_calls` was on when the plug-in was set up."""

    calls = 0
    enabled = False


def wrap(prototype: Any, function: Callable[..., Any], failure: Any, name: str) -> Any:
    """`function` as a C callback of type `prototype`, which answers `failure` when it raises."""

    def guarded(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as exc:
            with contextlib.suppress(BaseException):
                _report(name, args[0], exc)
            return failure

    def counted(*args: Any) -> Any:
        Counter.calls += 1
        return guarded(*args)

    interrupt.callback(guarded)
    interrupt.callback(counted)
    observed = counted if Counter.enabled else guarded
    lookup = name.rpartition(".")[2] in _LOOKUPS
    recorded = head.recording is not None and not lookup
    callback = prototype(_recorded(observed, name) if recorded else observed)
    _KEEP.append(callback)
    return callback


def _recorded(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """`call` as a span of the head's timeline, as long as there is one."""
    size_at = _SIZES.get(name)

    def recorded(*args: Any) -> Any:
        recorder = head.recording
        if recorder is None:
            return call(*args)
        device = owners.get(args[0])
        start = time.perf_counter_ns()
        result = call(*args)
        size = 0 if size_at is None else args[size_at]
        recorder.add(recorder.here(), name, start, device=device.name if device else "", size=size)
        return result

    interrupt.callback(recorded)
    return recorded


def keep(value: Any) -> Any:
    """Keep something that C points to, for as long as the process lives."""
    _KEEP.append(value)
    return value


def keep_for_ever(*values: Any) -> None:
    """Keep what C points to also while and after the interpreter ends."""
    for value in (_KEEP, *values):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))


def _report(name: str, first: int | None, exc: BaseException) -> None:
    if isinstance(exc, KeyboardInterrupt):
        interrupt.note()
    device = owners.get(first or 0)
    if device is None:
        return
    if not isinstance(exc, CaravanError):
        exc = CaravanError(f"internal error in {name}: {exc!r}")
    link = links.get(first or 0, device.link)
    link.stream.fail(exc, name)
