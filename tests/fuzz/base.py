"""A session of llama.cpp's protocol as the fuzzer leads it: replayed, then changed to its end."""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct

from caravan.wire import codec
from caravan.wire.commands import Base, base_table
from fuzz.corpus import Message, Recorded
from fuzz.mutate import Mutator

_BOUND = 20.0


class BaseSession:
    """See the module; `run` returns whether the worker has ended it.

    Attributes:
        sent: every message, in order.
        messages, mutated: how many, and how many of them were changed.
    """

    def __init__(self, endpoint: str, recorded: Recorded, rng: random.Random) -> None:
        self._recorded = recorded
        self._rng = rng
        self._table = base_table(recorded.protocol)
        self.sent: list[Message] = []
        self.messages = 0
        self.mutated = 0
        host, _, port = endpoint.rpartition(":")
        self._sock = socket.create_connection((host, int(port)), _BOUND)
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._closed = False

    def run(self) -> bool:
        try:
            self._sock.sendall(codec.hello_request(bytes(24)))
            self._read(36)
            kept = [m for m in self._recorded.messages if m.number != Base.FREE_BUFFER]
            for message in kept:
                self._call(message)
            self._attack(kept)
        except OSError:
            self._closed = True
        finally:
            self._sock.close()
        return self._closed

    def _attack(self, kept: list[Message]) -> None:
        rng, mutator = self._rng, Mutator(self._rng, self._recorded.protocol)
        while not self._closed and self.mutated < 200:
            message = rng.choice(kept)
            if rng.random() < 0.5:
                payload = mutator.payload(message.number, message.payload)
                message = Message(0, message.number, payload)
                self.mutated += 1
            self._call(message)

    def _call(self, message: Message) -> None:
        header = codec.base_request(message.number, len(message.payload))
        self._sock.sendall(header + message.payload)
        self.sent.append(message)
        self.messages += 1
        command = self._table[message.number]
        if command.silent:
            # it may have been the last one
            with contextlib.suppress(BlockingIOError):
                if select.select([self._sock], [], [], 0)[0] and not self._sock.recv(1):
                    self._closed = True
            return
        (length,) = struct.unpack("<Q", self._read(8))
        while length:
            length -= len(self._read(min(length, 1 << 16)))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self._sock.recv(size - len(data))
            if not part:
                raise ConnectionResetError
            data += part
        return bytes(data)
