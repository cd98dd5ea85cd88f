"""`Counters`: cheap running totals of one device's work; whoever works on the device adds to them.

Read by anything that reports; a reader may see a total that is one command old. Where the time goes
is in `Activity`.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Totals since the device was opened.

    Attributes:
        commands: how many of each command, by name.
        bytes_in, bytes_out: payload moved to and from the device.
        bytes_loaded: weights that this machine had itself.
        graphs: computations of a graph.
        graphs_built: graphs checked and built (the rest of the computations reused one).
    """

    commands: dict[str, int] = field(default_factory=dict)
    bytes_in: int = 0
    bytes_out: int = 0
    bytes_loaded: int = 0
    graphs: int = 0
    graphs_built: int = 0

    def count(self, command: str) -> None:
        """One more of `command`."""
        self.commands[command] = self.commands.get(command, 0) + 1
