"""Runs a fuzz in pieces: mutated messages to a live worker, pipelined, and a look at it after each.

A session is a recorded one, replayed as it was, and then a stream of its messages and of others',
changed. What ends it by a signal is looked into: which message it was, and if it is the kind of
crash that the data of an index can cause, which costs the head that sent it its session.
"""

from __future__ import annotations

import contextlib
import random
import socket
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from caravan.wire import extension
from caravan.wire.commands import EXT, Ext
from fuzz.attack import KEPT_OUT, Attack
from fuzz.base import BaseSession
from fuzz.corpus import Message, Recorded, load
from fuzz.crashes import Inquest
from fuzz.harness import first_words
from fuzz.mutate import Mutator
from fuzz.pipes import Broken
from fuzz.target import Finding, Target

_BATCH = 48
# Connections that say something wrong at once, before each session.
_STRANGERS = 20
# Without its buffers a session has little left to try.
_RARE = (*KEPT_OUT, Ext.FREE, Ext.TAKE)


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

    def lines(self, target: Target, by_index: int) -> list[str]:
        deaths = ", ".join(f"{n} {name}" for name, n in target.deaths.items()) or "none"
        statuses = ", ".join(f"{n} {name}" for name, n in self.statuses.most_common())
        grown = target.size() - target.first_size
        return [
            f"{self.messages} messages, {self.mutated} of them changed, in {self.sessions} sessions"
            f" and {self.seconds:.0f} s",
            f"  replies: {statuses}; connections closed in the base protocol: {self.refused}",
            f"  sessions left waiting for a copy or a long graph: {self.waiting}",
            f"  session processes that died by a signal: {deaths};"
            f" {by_index} by an index that was data",
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
        length: int = 10_000,
    ) -> None:
        self.target = target
        self.rng = random.Random(seed)
        self.tally = Tally()
        self.inquest = Inquest(target)
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
            self._strangers()
            if self._old and self.rng.random() < self._base:
                self._base_session(self.rng.choice(self._old))
            else:
                self._session(self.rng.choice(self._ext), end - self.tally.messages)
        self.target.check()
        self.inquest.close()
        self.tally.seconds += time.monotonic() - begin

    def _strangers(self) -> None:
        """First words that are wrong, to the supervisor itself."""
        host, _, port = self.target.endpoint.rpartition(":")
        words = first_words()
        for _ in range(_STRANGERS):
            data = Mutator(self.rng, 0).bytes_(self.rng.choice(words)[1:])
            sock = socket.create_connection((host, int(port)), 30)
            with sock, contextlib.suppress(OSError):
                sock.sendall(data)
                if self.rng.random() < 0.3:
                    sock.shutdown(socket.SHUT_WR)
                    sock.recv(1 << 16)
        self.tally.messages += _STRANGERS
        self.tally.mutated += _STRANGERS

    def _base_session(self, recorded: Recorded) -> None:
        session = BaseSession(self.target.endpoint, recorded, self.rng)
        died = session.run()
        self.tally.messages += session.messages
        self.tally.mutated += session.mutated
        self.tally.refused += died
        self.inquest.look(recorded, session.sent, 0.1)

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
            self.inquest.look(recorded, attack.sent, 0.2 if attack.lied else 5.0)

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
            if number in KEPT_OUT or (number == Ext.PEER_OPEN != message.number):
                number = Ext.FENCE
        else:
            payload = mutator.payload(number, payload)
        return Message(message.connection, number, payload), True


def run(
    folder: Path, messages: int, seed: int, piece: int = 20_000, seconds: float = float("inf")
) -> Fuzzer:
    """`messages` in pieces, or as many pieces as begin in `seconds`. Raises Finding."""
    begin = time.monotonic()
    with Target(folder) as target:
        fuzzer = Fuzzer(target, seed)
        while (done := fuzzer.tally.messages) < messages and time.monotonic() - begin < seconds:
            fuzzer.piece(min(piece, messages - done))
        fuzzer.told = fuzzer.tally.lines(target, fuzzer.inquest.by_index)
        return fuzzer
