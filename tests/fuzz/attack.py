"""`Attack`: a session of the extension as the fuzzer leads it, on all its connections."""

from __future__ import annotations

import json
import random
import time

from caravan.wire import codec
from caravan.wire.commands import EXT, Ext
from fuzz.corpus import Message, Recorded
from fuzz.pipes import Pipe, pump
from fuzz.target import Finding

# Seconds without a reply after which a device is taken to wait for what will not come.
_PATIENCE = 1.0
_BOUND = 60.0
KEPT_OUT = (Ext.BYE, Ext.SESSION, Ext.PEER, Ext.DATA)


class Attack:
    """A session of the extension as the fuzzer leads it.

    Args:
        bare: replay nothing by itself; what is sent has it all.

    Attributes:
        sent: everything, in order.
        closed: the worker has ended a connection.
        waiting: it was given up because a device waits, or computes, for long.
        lied: it has sent a length that was none, and so is not surprised at its end.
        cleared: put zeros into all buffers before each graph, so that few of them find an index
            out of range, which ends a session and shows nothing new.
    """

    def __init__(self, endpoint: str, recorded: Recorded, bare: bool = False) -> None:
        self._recorded = recorded
        self.pipes: list[Pipe] = []
        self.sent: list[Message] = []
        self.count = 0
        self.mutated = 0
        self.waiting = False
        self.cleared = False
        self.lied = False
        self._ended: bool | None = None
        buffers = sum(m.number == Ext.ALLOC for m in recorded.messages)
        pack = EXT[Ext.CLEAR].request.pack
        self._clears = [pack(handle, 0) for handle in range(1, 1 + buffers)]
        key = ""
        for device in recorded.devices:
            self.pipes.append(Pipe(endpoint, device, key))
            key = self.pipes[0].session.session
        session = self.pipes[0].session
        self._way = {"addresses": [endpoint], "key": session.peer_key}

    @property
    def closed(self) -> bool:
        if self._ended is not None:
            return self._ended
        return not all(pipe.open for pipe in self.pipes)

    def replay(self) -> bool:
        """The recorded session as it was, but for what frees memory or ends it."""
        kept = [m for m in self._recorded.messages if m.number not in (*KEPT_OUT, Ext.FREE)]
        for message in kept:
            if message.number == Ext.PEER_OPEN:
                self._open_way(message)
        # whoever asks first gets the first handle
        batches: list[list[tuple[Message, bool]]] = [[]]
        for message in kept:
            if message.number == Ext.ALLOC:
                batches += [(message, False)], []
            elif message.number != Ext.PEER_OPEN:
                batches[-1].append((message, False))
        return all(self.send(batch) for batch in batches)

    def _open_way(self, message: Message) -> None:
        """To the session itself: there is no other worker."""
        asked = {**json.loads(message.payload), **self._way}
        pipe = self.pipes[message.connection]
        self.send([(Message(0, message.number, json.dumps(asked).encode()), False)])
        deadline = time.monotonic() + _BOUND
        while pipe.open and not pipe.ways and time.monotonic() < deadline:
            pipe.fence()
            pump([pipe], _PATIENCE)

    def send(self, batch: list[tuple[Message, bool]]) -> bool:
        """Send them and wait until all has been done; False when the session is over."""
        for message, changed in batch:
            pipe = self.pipes[message.connection % len(self.pipes)]
            if self.cleared and message.number in (Ext.GRAPH_COMPUTE, Ext.GRAPH_RECOMPUTE):
                self.clear()
            pipe.post(message.number, message.payload, len(self.sent))
            self.sent.append(message)
            self.mutated += changed
        self.count += len(batch)
        for pipe in self.pipes:
            pipe.fence()
        if not pump(self.pipes, _PATIENCE):
            self._expect_pings()
            self.waiting = not self.closed
            return False
        return not self.closed

    def _expect_pings(self) -> None:
        """A device may wait, or compute; whoever reads requests may not."""
        wanted = {}
        for pipe in self.pipes:
            if pipe.open:
                wanted[pipe] = pipe.pings + 1
                pipe.post(Ext.PING, b"")
        deadline = time.monotonic() + _BOUND
        while any(p.open and p.pings < n for p, n in wanted.items()):
            if time.monotonic() > deadline:
                raise Finding(f"{self._recorded.name}: PING is not answered")
            pump([pipe for pipe in wanted if pipe.open], 0.2)

    def clear(self) -> None:
        """Zeros into all buffers."""
        for number, pipe in enumerate(self.pipes):
            for payload in self._clears:
                pipe.post(Ext.CLEAR, payload)
                self.sent.append(Message(number, Ext.CLEAR, payload))

    def lie(self, rng: random.Random) -> None:
        """A frame whose length is wrong, and what follows it."""
        self.lied = True
        pipe = rng.choice(self.pipes)
        number = rng.choice((*EXT, 255))
        pipe.post(number, rng.randbytes(50), length=rng.choice((0, 10, 1 << 20, codec.MAX_PAYLOAD)))
        for _ in range(rng.randrange(4)):
            pipe.post(rng.choice((*EXT, 255)), rng.randbytes(rng.randrange(100)))
        self.count += 1
        self.mutated += 1
        pump(self.pipes, 0.0)

    def close(self) -> None:
        self._ended = self.closed
        for pipe in self.pipes:
            pipe.close()
