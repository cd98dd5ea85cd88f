"""Which tokens the next step computes. Pure: slots in, counts out."""

from __future__ import annotations

from collections.abc import Mapping


def share(prompts: Mapping[int, int], budget: int) -> dict[int, int]:
    """How many tokens of each prompt are read next.

    All get the same, and what the short ones do not need goes to the long ones: so a short prompt
    that comes after a long one is read at once.

    Args:
        prompts: tokens left, by slot.
        budget: tokens in all.

    Returns: tokens by slot, without those that get none; in all `budget`, or all that is left.
    """
    shares: dict[int, int] = {}
    left, waiting = budget, sorted(prompts.items(), key=lambda item: item[1])
    for index, (slot, wanted) in enumerate(waiting):
        # the first ones get what does not divide
        count = min(wanted, -(-left // (len(waiting) - index)))
        if count > 0:
            shares[slot] = count
        left -= count
    return shares


class Pace:
    """How many tokens of prompts go into a step that others decode in, so that it does not take
    them longer than `seconds`.

    Args:
        least, most: bounds of the answer.
    """

    def __init__(self, seconds: float, least: int, most: int) -> None:
        self._seconds = seconds
        self._least, self._most = min(least, most), most
        self._per_token = 0.0

    @property
    def budget(self) -> int:
        if not self._per_token:
            return self._least
        return max(self._least, min(self._most, int(self._seconds / self._per_token)))

    def note(self, tokens: int, seconds: float) -> None:
        """A step with so many tokens of prompts took so long."""
        cost = seconds / tokens
        self._per_token += (cost - self._per_token) * (0.3 if self._per_token else 1.0)
