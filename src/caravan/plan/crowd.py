"""Prompts that come at once, as a batcher's lanes read them: in turns, part by part.

The parts are those of `batching.policy`, the bound on what is under way that of `batching.lane`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from caravan.batching.lane import STEP_SECONDS
from caravan.batching.policy import Pace, Prompt, plan
from caravan.llm.shared import TILE
from caravan.plan.events import Ticket
from caravan.plan.simulator import Run, Steps, Ubatch, share


@dataclass(slots=True)
class _Slot:
    total: int
    done: int = 0
    served: int = -1
    n_gen: int = 0

    @property
    def is_reading(self) -> bool:
        return self.done < self.total


class _Lane:
    """A lane with a prompt in each slot. Whoever has read its own generates, as it would."""

    def __init__(self, run: Run, n_slots: int, n_prompt: int, firsts: list[float]) -> None:
        self._run = run
        self._slots = [_Slot(n_prompt) for _ in range(n_slots)]
        self._firsts = firsts
        self._most = max(2, run.n_stages)
        self._marks: deque[Ticket] = deque()
        self._shape: object = None

    def steps(self) -> Steps:
        """Until all have their first token."""
        most, clock = self._run.setting.n_ubatch, self._run.clock
        pace = Pace(STEP_SECONDS, TILE, most)
        n_steps = 0
        while any(slot.is_reading for slot in self._slots):
            n_steps, began = n_steps + 1, clock.now
            generating = [slot for slot in self._slots if not slot.is_reading]
            prompts = [
                Prompt(number, slot.done, slot.total, slot.served)
                for number, slot in enumerate(self._slots)
                if slot.is_reading
            ]
            parts = plan(prompts, pace.budget if generating else most, most)
            for number, count in parts:
                self._slots[number].served = n_steps
                yield from self._read(self._slots[number], count)
            if generating:
                yield from self._generate(generating)
                pace.note(sum(count for _, count in parts), clock.now - began)

    def _read(self, slot: _Slot, count: int) -> Steps:
        last = slot.done + count == slot.total
        yield from self._post(Ubatch(count, slot.done, int(last)))
        slot.done += count
        if last:
            yield from self._answer([slot])
            self._firsts.append(self._run.clock.now)
            return
        self._marks.append(self._run.fetch(0))
        while len(self._marks) > self._most:
            yield self._marks.popleft()

    def _generate(self, slots: list[_Slot]) -> Steps:
        n_past = max(slot.total + slot.n_gen - 1 for slot in slots)
        yield from self._post(Ubatch(len(slots), n_past, len(slots), decode=True))
        yield from self._answer(slots)

    def _post(self, ubatch: Ubatch) -> Steps:
        yield from self._run.post(ubatch, ubatch.shape == self._shape)
        self._shape = ubatch.shape

    def _answer(self, slots: list[_Slot]) -> Steps:
        yield self._run.fetch(len(slots))
        yield self._run.locked(self._run.setting.head.sample * len(slots))
        for slot in slots:
            slot.n_gen += 1


def read_together(run: Run, n_prompt: int, concurrency: int) -> float:
    """Seconds until each of so many prompts, which come at once, has its first token."""
    firsts = [0.0]
    lanes = [_Lane(run, n, n_prompt, firsts) for n in share(concurrency, run.n_stages)]
    run.go(*(lane.steps() for lane in lanes))
    return max(firsts)
