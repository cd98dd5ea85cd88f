"""`Inquest`: why a session process died by a signal: which message it was, and which node of it.

What the data of an index does is known and costs the head that sent it its session. All else is a
finding: a rule should have refused it.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from caravan.engine.layouts import OP_NAMES
from caravan.wire.commands import EXT, Ext
from caravan.wire.records import EXT_TENSOR
from fuzz.attack import Attack
from fuzz.corpus import Message, Recorded
from fuzz.target import Target

_BATCH = 48
# Of one kind; the others are counted.
_LOOKED_INTO = 3

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


class Inquest:
    """See the module.

    Attributes:
        crashes: those that were looked into.
        kinds: how often each was met.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.crashes: list[Crash] = []
        self.kinds: Counter[str] = Counter()
        self._seen = 0

    @property
    def by_index(self) -> int:
        """How many were an index out of range."""
        return sum(n for kind, n in self.kinds.items() if any(text in kind for text in INDICES))

    def look(self, recorded: Recorded, sent: list[Message], patience: float) -> None:
        """Whether a session that ended has died, and why; its death may be told in a while."""
        lines = self._death(patience)
        if lines is None:
            return
        reason = next((line for line in lines if "GGML_ASSERT" in line or "abort" in line), "")
        reason = reason.rpartition("/")[2] or next(line for line in lines if "died by" in line)
        known = reason.partition("died by")[2] or reason
        self.kinds[known] += 1
        if any(text in known for text in INDICES) or self.kinds[known] > _LOOKED_INTO:
            return
        if recorded.protocol:
            last = sent[-1]
            self.crashes.append(Crash(recorded.name, last.number, last.payload, known, False))
        else:
            self.crashes.append(self._looked_into(recorded, sent, known))

    def close(self) -> None:
        """Deaths that were told too late to be looked into are findings too."""
        if self._death(0.1) is not None or sum(self.target.deaths.values()) > self._seen:
            self.crashes.append(Crash("?", 0, b"", "told late", False))
            self._seen = sum(self.target.deaths.values())

    def _looked_into(self, recorded: Recorded, sent: list[Message], reason: str) -> Crash:
        index = self._culprit(recorded, sent)
        if index is None:
            return Crash(recorded.name, 0, b"", f"{reason}; not again", False)
        message = sent[index]
        alone = [*_graph_of(message, sent[:index]), message]
        if not self._dies(recorded, alone):
            reason += "; not alone"
            return Crash(recorded.name, message.number, message.payload, reason, False)
        crash = Crash(recorded.name, message.number, alone[0].payload, reason, False)
        crash.data = not self._dies(recorded, alone, zeros=True)
        if alone[0].number == Ext.GRAPH_COMPUTE:
            crash.op, crash.payload = self._node(recorded, alone[0], zeros=not crash.data)
        return crash

    def _death(self, patience: float = 5.0) -> list[str] | None:
        """The worker's last lines if a session process has died by a signal."""
        deadline = time.monotonic() + patience
        lines: list[str] = []
        while True:
            lines += self.target.news()
            if sum(self.target.deaths.values()) > self._seen:
                self._seen += 1
                return lines
            if time.monotonic() > deadline:
                return None
            time.sleep(0.01)

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
                    return index if attack.closed and self._death() is not None else None
            return None
        finally:
            attack.close()

    def _dies(self, recorded: Recorded, messages: list[Message], zeros: bool = False) -> bool:
        attack = Attack(self.target.endpoint, recorded)
        try:
            if not attack.replay():
                return self._death() is not None
            if zeros:
                attack.clear()
            attack.send([(message, False) for message in messages])
            return attack.closed and self._death() is not None
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


def _graph_of(message: Message, before: list[Message]) -> list[Message]:
    """The graph that a GRAPH_RECOMPUTE means."""
    if message.number != Ext.GRAPH_RECOMPUTE:
        return []
    uid = message.payload[:8]
    graphs = [m for m in before if m.number == Ext.GRAPH_COMPUTE and m.payload[:8] == uid]
    return graphs[-1:]
