"""What is known of devices and of the links between them: numbers, measured or written by hand.

Knows no model and no engine. Made by `probe`, kept by `store`, read from files by `cluster`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

HEAD = -1  # the head, where a device's number is asked for


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """One way between two ends; the same in both directions.

    Attributes:
        seconds: that a short message takes in one direction.
        rate: bytes a second; infinite where nobody has noticed any limit.
        way: `direct`, `within` one worker, or `relay`: through the head, which costs both hops.
    """

    seconds: float = 0.0
    rate: float = math.inf
    way: str = "direct"

    def transfer(self, size: float) -> float:
        """Seconds that the link is taken by so many bytes; they arrive `seconds` after that."""
        return size / self.rate


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """One device.

    Attributes:
        name: as `--device` takes it, such as `RPC0`.
        gflops: 10^9 operations of arithmetic a second in a product of matrices with many columns;
            a multiply-add is two.
        gbps: 10^9 bytes of memory that it reads a second.
        graph: seconds that each graph takes on top of what it computes.
        turn: seconds from the arrival of a decode step's message on an idle device to its answer,
            without what is computed.
        memory_free, memory_total: bytes.
        host: those of one host share its processors; empty: nobody knows.
        check: seconds for each node of a new graph until it can be computed; the device itself
            goes on with what it has meanwhile.
        check_graph: for a new graph as such, beside its nodes.
        threads: processors of its host that it takes while it computes; 0: none.
    """

    name: str
    gflops: float
    gbps: float
    graph: float = 0.0
    turn: float = 0.0
    memory_free: int = 0
    memory_total: int = 0
    host: str = ""
    check: float = 0.0
    threads: float = 0.0
    check_graph: float = 0.0


@dataclass(frozen=True, slots=True)
class ClusterProfile:
    """Devices, and the links between them and to the head.

    Attributes:
        to_head: a link for each device.
        between: by (source, target), numbers of devices; what is not there is a relay.
        processors: of each host by name; one that is not there has enough of them.
    """

    devices: tuple[DeviceProfile, ...]
    to_head: tuple[LinkProfile, ...]
    between: Mapping[tuple[int, int], LinkProfile] = field(default_factory=dict)
    processors: Mapping[str, float] = field(default_factory=dict)

    def link(self, source: int, target: int) -> LinkProfile:
        """From one device to another, or to or from HEAD."""
        if HEAD in (source, target):
            return self.to_head[max(source, target)]
        found = self.between.get((source, target))
        if found is not None and found.way != "relay":
            return found
        one, other = self.to_head[source], self.to_head[target]
        return LinkProfile(one.seconds + other.seconds, min(one.rate, other.rate), "relay")
