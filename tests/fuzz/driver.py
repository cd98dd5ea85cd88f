"""Runs a fuzz in pieces: mutated messages to a live worker, pipelined, and a look at it after each.

A session is a recorded one, replayed as it was, and then a stream of its messages and of others',
changed. What ends it by a signal is looked into: which message it was, and if it is the kind of
crash that the data of an index can cause, which costs the head that sent it its session.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from caravan.engine.layouts import OP_NAMES
from caravan.wire import codec, extension
from caravan.wire.commands import EXT, Ext
from caravan.wire.records import EXT_TENSOR
from fuzz.base import BaseSession
from fuzz.corpus import Message, Recorded, load
from fuzz.mutate import Mutator
from fuzz.pipes import Broken, Pipe, pump
from fuzz.target import Finding, Target

_BATCH = 48
_PATIENCE = 1.0
_BOUND = 60.0
_KEPT_OUT = (Ext.BYE, Ext.SESSION, Ext.PEER, Ext.DATA)
# Without its buffers a session has little left to try.
_RARE = (*_KEPT_OUT, Ext.FREE, Ext.TAKE)


# What the kernels say of an index out of range, which is data: nobody sees it before it is read.
INDICES = (
    "GGML_ASSERT(i01 >= 0 && i01 < ne01)",  # GET_ROWS
    "GGML_ASSERT(i1 >= 0 && i1 < ne1)",  # SET_ROWS
)


@dataclass
class Crash:
    """A message after which a session process died by a signal.

    Attributes:
        data: whether only by what the buffers held: with zeros in them it does no harm.
        op: of the one node that does it alone, if one does.
    """

    session: str
    number: int
    payload: bytes
    reason: str
    data: bool
    op: str = ""


@dataclass
class Tally:
    """What has been done. `mutated` of the `messages` were changed."""

    messages: int = 0
    mutated: int = 0
    sessions: int = 0
    waiting: int = 0
    seconds: float = 0.0
    statuses: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    crashes: list[Crash] = field(default_factory=list)
    repeats: Counter[str] = field(default_factory=Counter)

    def lines(self, target: Target) -> list[str]:
        known = sum(n for text, n in self.repeats.items() if any(i in text for i in INDICES))
        deaths = ", ".join(f"{n} {name}" for name, n in target.deaths.items()) or "none"
        statuses = ", ".join(f"{n} {name}" for name, n in self.statuses.most_common())
        grown = target.size() - target.first_size
        return [
            f"{self.messages} messages, {self.mutated} of them changed, in {self.sessions} sessions"
            f" and {self.seconds:.0f} s",
            f"  replies: {statuses}; connections closed in the base protocol: {self.refused}",
            f"  sessions left waiting for a copy or a long graph: {self.waiting}",
            f"  session processes that died by a signal: {deaths};"
            f" {known} by an index that was data",
            f"  memory of the supervisor: {target.size() >> 10} KiB ({grown >> 10:+d} KiB)",
        ]


class Fuzzer:
    """See the module.

    Args:
        base: the share of sessions that speak the base protocol. It ends a connection at the first
            refusal, and with it a process.
        length: messages of a session of the extension.
    """

    def __init__(
        self,
        target: Target,
        seed: int,
        corpus: list[Recorded] | None = None,
        base: float = 0.1,
        length: int = 3000,
    ) -> None:
        self.target = target
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.told: list[str] = []
        self._base = base
        self._length = length
        corpus = corpus if corpus is not None else load()
        self._ext = [session for session in corpus if session.protocol == 0]
        self._old = [session for session in corpus if session.protocol == 8]
        self._every = [m for s in self._ext for m in s.messages if m.number not in _RARE]

    def piece(self, messages: int) -> None:
        """Send so many, then look at the worker; raises Finding."""
        begin, end = time.monotonic(), self.tally.messages + messages
        while self.tally.messages < end:
            self.tally.sessions += 1
            if self._old and self.rng.random() < self._base:
                self._base_session(self.rng.choice(self._old))
            else:
                self._session(self.rng.choice(self._ext), end - self.tally.messages)
        self.target.check()
        self.target.news()
        self.tally.seconds += time.monotonic() - begin

    def _base_session(self, recorded: Recorded) -> None:
        session = BaseSession(self.target.endpoint, recorded, self.rng)
        died = session.run()
        self.tally.messages += session.messages
        self.tally.mutated += session.mutated
        self.tally.refused += died
        self._look_for_death(recorded, session.sent, base=True)

    # a session of the extension

    def _session(self, recorded: Recorded, most: int) -> None:
        attack = Attack(self.target.endpoint, recorded)
        mutator = Mutator(self.rng, 0)
        try:
            going = attack.replay()
            attack.cleared = self.rng.random() < 0.97
            while going and attack.count < min(self._length, most):
                going = attack.send(self._batch(recorded, mutator))
            if going and self.rng.random() < 0.2:
                attack.lie(self.rng)
        except Broken as exc:
            raise Finding(f"{recorded.name}: {exc}") from exc
        finally:
            attack.close()
        self.tally.messages += attack.count
        self.tally.mutated += attack.mutated
        self.tally.waiting += attack.waiting
        for pipe in attack.pipes:
            for status, count in pipe.statuses.items():
                self.tally.statuses[extension.Status(status).name] += count
        if attack.closed:
            self._look_for_death(recorded, attack.sent)

    def _batch(self, recorded: Recorded, mutator: Mutator) -> list[tuple[Message, bool]]:
        """Messages as they follow each other in a recorded session, and what was changed."""
        rng = self.rng
        graphs = [m for m in recorded.messages if m.number == Ext.GRAPH_COMPUTE]
        start = rng.randrange(len(recorded.messages))
        chosen = recorded.messages[start : start + _BATCH]
        batch: list[tuple[Message, bool]] = []
        for message in chosen:
            dice = rng.random()
            if message.number == Ext.FREE and dice < 0.997:
                continue
            # it would wait for what nobody pushes, and the session with it
            if message.number == Ext.TAKE and dice < 0.997:
                continue
            if dice < 0.02:
                continue
            if dice > 0.75:
                message = rng.choice(graphs)
            elif dice < 0.1:
                other = rng.choice(self._every)
                message = Message(message.connection, other.number, other.payload)
            if dice < 0.04:
                batch.append((message, True))
            batch.append(self._changed(message, mutator, rng.random()))
        if len(batch) > 1 and rng.random() < 0.5:
            i, j = rng.randrange(len(batch)), rng.randrange(len(batch))
            batch[i], batch[j] = batch[j], batch[i]
        return batch

    def _changed(self, message: Message, mutator: Mutator, dice: float) -> tuple[Message, bool]:
        if dice < 0.2:
            return message, False
        number, payload = message.number, message.payload
        if dice < 0.22:
            number = self.rng.choice((*EXT, *range(20), 255))
            if number in _KEPT_OUT or (number == Ext.PEER_OPEN != message.number):
                number = Ext.FENCE
        else:
            payload = mutator.payload(number, payload)
        return Message(message.connection, number, payload), True

    # crashes

    def _look_for_death(self, recorded: Recorded, sent: list[Message], base: bool = False) -> None:
        lines = _death(self.target, patient=not base)
        if lines is None:
            return
        reason = next((line for line in lines if "GGML_ASSERT" in line or "abort" in line), "")
        reason = reason.rpartition("/")[2] or next(line for line in lines if "died by" in line)
        known = reason.partition("died by")[2] or reason
        self.tally.repeats[known] += 1
        if any(text in known for text in INDICES):
            return
        if self.tally.repeats[known] <= 3 and not base:
            self.tally.crashes.append(self._looked_into(recorded, sent, known))
        elif base:
            last = sent[-1]
            self.tally.crashes.append(Crash(recorded.name, last.number, last.payload, known, False))

    def _looked_into(self, recorded: Recorded, sent: list[Message], reason: str) -> Crash:
        index = self._culprit(recorded, sent)
        if index is None:
            return Crash(recorded.name, 0, b"", f"{reason}; not again", True)
        message = sent[index]
        alone = [message]
        if not self._dies(recorded, alone):
            return Crash(
                recorded.name, message.number, message.payload, f"{reason}; not alone", True
            )
        crash = Crash(recorded.name, message.number, message.payload, reason, False)
        crash.data = not self._dies(recorded, alone, zeros=True)
        if message.number == Ext.GRAPH_COMPUTE:
            crash.op, crash.payload = self._node(recorded, message, zeros=not crash.data)
        return crash

    def _culprit(self, recorded: Recorded, sent: list[Message]) -> int | None:
        """Which of the messages it was, by sending them again and waiting after each."""
        attack = Attack(self.target.endpoint, recorded, bare=True)
        try:
            last = max(0, len(sent) - 2 * _BATCH * len(attack.pipes))
            for start in range(0, last, _BATCH):
                if not attack.send([(m, False) for m in sent[start : min(start + _BATCH, last)]]):
                    return None
            for index in range(last, len(sent)):
                if not attack.send([(sent[index], False)]):
                    return index if attack.closed and _death(self.target) is not None else None
            return None
        finally:
            attack.close()

    def _dies(self, recorded: Recorded, messages: list[Message], zeros: bool = False) -> bool:
        attack = Attack(self.target.endpoint, recorded)
        try:
            if not attack.replay():
                return _death(self.target) is not None
            if zeros:
                attack.clear()
            attack.send([(message, False) for message in messages])
            return attack.closed and _death(self.target) is not None
        finally:
            attack.close()

    def _node(self, recorded: Recorded, message: Message, zeros: bool) -> tuple[str, bytes]:
        """The one node that does it, as a graph of its own; or the whole graph."""
        head = EXT[Ext.GRAPH_COMPUTE].request
        with contextlib.suppress(Exception):
            _, n_nodes, _ = head.unpack(message.payload[: head.size])
            rows = np.frombuffer(message.payload[head.size :], EXT_TENSOR)
            for node in range(n_nodes):
                part = one_node(rows, node)
                payload = head.pack(0, 1, len(part)) + part.tobytes()
                single = Message(message.connection, message.number, payload)
                if self._dies(recorded, [single], zeros):
                    return OP_NAMES[int(part["op"][0])], payload
        return "", message.payload


def one_node(rows: np.ndarray, node: int) -> np.ndarray:
    """A node and what it refers to, as a table of one node."""
    chosen = [node]
    for at in (*rows["src"][node].tolist(), int(rows["view_src"][node])):
        if at >= 0 and at not in chosen:
            chosen.append(at)
    part = rows[chosen].copy()
    place = {old: new for new, old in enumerate(chosen)}
    for new, old in enumerate(chosen):
        part["src"][new] = [place.get(int(s), -1) if new == 0 else -1 for s in rows["src"][old]]
        part["view_src"][new] = place.get(int(rows["view_src"][old]), -1) if new == 0 else -1
    return part


class Attack:
    """A session of the extension as the fuzzer leads it.

    Args:
        bare: replay nothing by itself; what is sent has it all.

    Attributes:
        sent: everything, in order.
        closed: the worker has ended a connection.
        waiting: it was given up because a device waits, or computes, for long.
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
        return not all(pipe.open for pipe in self.pipes)

    def replay(self) -> bool:
        """The recorded session as it was, but for what frees memory or ends it."""
        kept = [m for m in self._recorded.messages if m.number not in (*_KEPT_OUT, Ext.FREE)]
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
        pipe = rng.choice(self.pipes)
        number = rng.choice((*EXT, 255))
        pipe.post(number, rng.randbytes(50), length=rng.choice((0, 10, 1 << 20, codec.MAX_PAYLOAD)))
        for _ in range(rng.randrange(4)):
            pipe.post(rng.choice((*EXT, 255)), rng.randbytes(rng.randrange(100)))
        self.count += 1
        self.mutated += 1
        pump(self.pipes, 0.0)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()


def _death(target: Target, patient: bool = True) -> list[str] | None:
    """The worker's last lines if a session process has died by a signal."""
    deadline = time.monotonic() + (5.0 if patient else 0.0)
    before = sum(target.deaths.values())
    lines: list[str] = []
    while True:
        lines += target.news()
        if sum(target.deaths.values()) > before:
            return lines
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)


def run(
    folder: Path, messages: int, seed: int, piece: int = 20_000, seconds: float = float("inf")
) -> Fuzzer:
    """`messages` in pieces, or as many pieces as begin in `seconds`. Raises Finding."""
    begin = time.monotonic()
    with Target(folder) as target:
        fuzzer = Fuzzer(target, seed)
        while (done := fuzzer.tally.messages) < messages and time.monotonic() - begin < seconds:
            fuzzer.piece(min(piece, messages - done))
        fuzzer.told = fuzzer.tally.lines(target)
        return fuzzer
