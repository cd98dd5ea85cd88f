"""`RemoteDevice`: one device of a worker as a ggml_backend_device, and the device slots.

The structs of a device, its buffer type and the registry must live as long as the process, since
the engine keeps their addresses; `callbacks.keep` holds them.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from caravan import interrupt
from caravan.backend import callbacks
from caravan.backend.backend import RemoteBackend, backends
from caravan.backend.buffer import TensorSizes, buffers
from caravan.backend.weights import Sink, current
from caravan.engine import layouts
from caravan.errors import CaravanError, DeviceError, RemoteError
from caravan.stream.dispatcher import Stream
from caravan.stream.link import DeviceLink
from caravan.stream.routes import Route
from caravan.stream.telemetry import DeviceStats, ask_stats
from caravan.stream.ticket import Ticket
from caravan.wire.dtypes import WireType
from caravan.wire.extension import SIMULATED

if TYPE_CHECKING:
    from caravan.backend.connection import Connection
    from caravan.backend.plugin import Plugin

_MEMORY_SECONDS = 1.0
_size = ctypes.c_size_t.from_address

# told the name and the padded bytes of a tensor
Watcher = Callable[[bytes, int], None]


class RemoteDevice:
    """One device of a worker.

    Attributes:
        name: on this head, such as `RPC0`.
        description: what the worker says of it.
        endpoint: `HOST:PORT` of the worker.
        engine: version of the worker's ggml; empty for a llama.cpp server, which does not say.
        handle: address of the ggml_backend_device, for the engine.
        link: the verbs; another one after a loss, see `renew`.
        connection: where the link comes from, and a new one may.
        allocation_error: why the last allocation was refused, if it was.
        wire_type: how activations travel to it, where they travel.
        simulated: whether it only costs time: what is written there is not kept.
        loaders: threads that are loading a model without weights.
        sinks: who brings the weights that a thread is loading; see `weights.bringing`.
        watchers: by thread, who is told of each tensor whose size the engine asks for.
        published: whether the engine has it in its own list; see `Plugin.publish`.
        withdrawn: whether it is in that list without being there any more.
    """

    def __init__(
        self, plugin: Plugin, link: DeviceLink, name: str, endpoint: str, engine: str = ""
    ) -> None:
        self.plugin = plugin
        self.link = link
        self.name = name
        self.endpoint = endpoint
        self.engine = engine
        self.description = link.info.description
        self.wire_type = WireType.F32
        self.simulated = link.info.name == SIMULATED
        self.published = False
        self.withdrawn = False
        self.loaders: set[int] = set()
        self.watchers: dict[int, Watcher] = {}
        self._loaders_lock = threading.Lock()
        self.sinks: dict[int, Sink] = {}
        self.allocation_error: DeviceError | None = None
        self.sizes = TensorSizes(self)
        self.connection: Connection | None = None
        self._routes: dict[tuple[DeviceLink, DeviceLink], Route] = {}
        self._memory = (link.info.memory_free, link.info.memory_total)
        self._memory_at = time.monotonic()
        self.c_name = callbacks.keep(ctypes.create_string_buffer(name.encode()))
        self.c_description = callbacks.keep(ctypes.create_string_buffer(endpoint.encode()))
        self.c_buffer_type_name = callbacks.keep(
            ctypes.create_string_buffer(f"RPC{link.index}[{endpoint}]".encode())
        )
        structs = plugin.new_device(self)
        self.handle = ctypes.addressof(structs.device)
        self.buffer_type = ctypes.addressof(structs.buffer_type)

    def __repr__(self) -> str:
        return f"<RemoteDevice {self.name} at {self.endpoint}: {self.description}>"

    @property
    def poll(self) -> int:
        """0...100: how long a thread that waits for it looks for the answer before it sleeps.

        Of all devices behind one connection (those of a llama.cpp server), it is one.
        """
        return self.link.stream.poll

    @poll.setter
    def poll(self, level: int) -> None:
        self.link.stream.poll = level

    def memory(self) -> tuple[int, int]:
        """Free and total bytes, as the worker says; asked at most once a second while nothing is
        allocated or freed from here."""
        now = time.monotonic()
        if now - self._memory_at > _MEMORY_SECONDS and not self.link.stream.ended:
            self._memory = self.link.memory()
            self._memory_at = now
        return self._memory

    def memory_changed(self) -> None:
        """What `memory` last said holds no more."""
        self._memory_at = -math.inf

    def route_to(self, other: RemoteDevice) -> Route:
        """The way of copies from here to another device."""
        return self.route(self.link, other.link)

    def route(self, src: DeviceLink, dst: DeviceLink) -> Route:
        """The way from a link of this device to one of another device."""
        route = self._routes.get((src, dst))
        if route is None:
            for links in list(self._routes):
                if any(link.stream.ended for link in links):
                    self._routes.pop(links, None)
            route = self._routes.setdefault((src, dst), Route(src, dst))
        return route

    def renew(self, link: DeviceLink) -> None:
        """From here on, go by the link of a new session. What was put on the device over the old
        one is lost."""
        link.stream.poll = self.poll
        self.link = link
        self._memory = (link.info.memory_free, link.info.memory_total)
        self._memory_at = time.monotonic()

    def allocated(self) -> dict[str, int]:
        """Bytes that live buffers take on the device, by use: weights, kv, compute."""
        sizes = {"weights": 0, "kv": 0, "compute": 0}
        for buffer in list(buffers.values()):
            if buffer.device is self and buffer.link is self.link:
                sizes[("kv", "weights", "compute")[buffer.usage]] += buffer.size
        return sizes

    @contextmanager
    def without_weights(self) -> Iterator[None]:
        """Inside, the engine's loader on this thread takes the device's buffers for memory that it
        can read its file into. That must be a file that has no data (`engine.hollow`): the loader
        then makes the tensors and touches nothing."""
        thread = threading.get_ident()
        try:
            self._loading(self.loaders.add, thread)
            yield
        finally:
            self._loading(self.loaders.discard, thread)

    def _loading(self, change: Callable[[int], None], thread: int) -> None:
        with self._loaders_lock:
            change(thread)
            self.plugin.ask_is_host(self.buffer_type, bool(self.loaders))

    @contextmanager
    def watched_sizes(self, watcher: Watcher) -> Iterator[None]:
        """Inside, `watcher` is told the name of each tensor whose size in a buffer the engine asks
        for on this thread, and that size."""
        thread = threading.get_ident()
        try:
            with self._loaders_lock:
                self.watchers[thread] = watcher
                self._watch()
            yield
        finally:
            with self._loaders_lock:
                self.watchers.pop(thread, None)
                self._watch()

    def _watch(self) -> None:
        self.plugin.watch_sizes(self.buffer_type, bool(self.watchers), self.link.info.pads)

    def stats(self) -> DeviceStats | None:
        """What the device has done so far, as its worker counted it; None if that does not count.

        Asks and waits; raises WorkerLost.
        """
        if not self.link.extension:
            return None
        try:
            return ask_stats(self.link.stream)
        except RemoteError:
            # a worker of an older version
            return None

    def check(self) -> None:
        """Raises WorkerLost once the device is lost, or its cluster closed.

        What still waits for company in the stream leaves now. After a loss it waits, 1.5 s at most,
        for what the worker says of it.
        """
        self.link.stream.check()

    def hold(self) -> Stream:
        """Whose `check` raises WorkerLost once what is put on the device from now on is lost, also
        when the device has come back since."""
        return self.link.stream

    def mark(self) -> Ticket:
        """What waits until everything that the device was asked for up to now has been done."""
        return self.link.fence()

    def tell(self) -> interrupt.Throw | None:
        """Why a published device, which nobody looks after, does not answer: the Python code that
        has called C gets the error. C cannot be told that a read gave zeros, and of a computation
        that failed it says no more than that."""
        failure = self.link.stream.failure
        return None if failure is None else interrupt.Throw(failure)


# device slots


def get_name(pointer: int) -> int:
    return ctypes.addressof(callbacks.owners[pointer].c_name)


def get_description(pointer: int) -> int:
    return ctypes.addressof(callbacks.owners[pointer].c_description)


def get_memory(pointer: int, free: int, total: int) -> None:
    device = callbacks.owners[pointer]
    try:
        sizes = device.memory()
    except CaravanError:
        sizes = (0, 0)
    _size(free).value, _size(total).value = sizes


def get_type(pointer: int) -> int:
    # the engine cannot take a device out of its list, but takes no further CPU for a model either
    if callbacks.owners[pointer].withdrawn:
        return layouts.DEVICE_TYPE_CPU
    return layouts.DEVICE_TYPE_GPU


def get_props(pointer: int, props_pointer: int) -> None:
    props = layouts.DeviceProps.from_address(props_pointer)
    props.name = get_name(pointer)
    props.description = get_description(pointer)
    get_memory(
        pointer,
        props_pointer + layouts.DeviceProps.memory_free.offset,
        props_pointer + layouts.DeviceProps.memory_total.offset,
    )
    props.type = get_type(pointer)
    props.device_id = None
    props.caps_async = True
    props.caps_host_buffer = False
    props.caps_buffer_from_host_ptr = False
    props.caps_events = True
    props.caps_mmap_support = True


def init_backend(pointer: int, params: int | None) -> int | None:
    device = callbacks.owners[pointer]
    if device.published and device.link.stream.ended:
        # whoever asks does not look after the device as we do: let there be no context
        return None
    struct = device.plugin.new_backend(pointer)
    backend = RemoteBackend(device, struct)
    backends[backend.pointer] = backend
    callbacks.owners[backend.pointer] = device
    callbacks.links[backend.pointer] = backend.link
    return backend.pointer


def get_buffer_type(pointer: int) -> int:
    device = callbacks.owners[pointer]
    sink = current(device)
    if sink is not None:
        # the loader asks for it when it has read the file's header and has not mapped the data
        sink.opened()
    return device.buffer_type


def supports_op(pointer: int, op: int) -> bool:
    # a worker's device says no when the graph arrives, in an error that names the op
    return True


def supports_buft(pointer: int, buft: int) -> bool:
    return callbacks.owners[pointer].buffer_type == buft


# slots of names that C asks of other structs than the device


def buffer_type_name(pointer: int) -> int:
    return ctypes.addressof(callbacks.owners[pointer].c_buffer_type_name)


def backend_name(pointer: int) -> int:
    return ctypes.addressof(callbacks.owners[pointer].c_name)
