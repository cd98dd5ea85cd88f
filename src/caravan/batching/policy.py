"""Which tokens of prompts the next step reads. Pure: prompts in, parts out.

Answers shall not depend on who else is there. Kernels give the same bits for a token whatever else
is computed with it, with one exception: attention of fewer than `TILE` tokens is summed up in
another order than that of more. So a prompt is cut in such a way that each of its tokens is on the
side of that border where it is when the prompt is alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from caravan.llm.shared import TILE


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt that is read.

    Attributes:
        slot: where.
        done: tokens that are read, of those that were not there already.
        total: tokens to be read in all.
        served: the last step in which some were.
    """

    slot: int
    done: int
    total: int
    served: int


def plan(prompts: Sequence[Prompt], budget: int, n_ubatch: int) -> list[tuple[int, int]]:
    """(slot, tokens) of the parts that the next step reads.

    Who has waited longest comes first, among these who has the least left: so a short prompt that
    comes after a long one is read at once. At least one part is read, however small the budget is.

    Args:
        budget: tokens in all, about.
        n_ubatch: tokens of a micro-batch, which a part never exceeds.
    """
    parts: list[tuple[int, int]] = []
    for prompt in sorted(prompts, key=lambda p: (p.served, p.total - p.done)):
        if budget <= 0:
            break
        count = part(prompt.done, prompt.total, budget, n_ubatch)
        parts.append((prompt.slot, count))
        budget -= count
    return parts


def part(done: int, total: int, budget: int, n_ubatch: int) -> int:
    """How many tokens of a prompt come next.

    Alone it is read in micro-batches. Within one, parts of `TILE` and more are as good as the
    whole.
    """
    left = min(total, done - done % n_ubatch + n_ubatch) - done
    if left < 2 * TILE:
        return left
    return max(TILE, min(budget, left - TILE)) if budget < left else left


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
