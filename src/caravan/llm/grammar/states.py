"""`States`: a pattern's automaton made deterministic, for texts of so many characters.

So a grammar of it can be read in one way only. Called by `strings`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from caravan.errors import UsageError
from caravan.llm.grammar.pattern import ANY, Automaton, Ranges, normal


@dataclass(frozen=True, slots=True)
class States:
    """A deterministic automaton; the first state is the beginning.

    Attributes:
        steps: of each state, the characters and the state they lead to; no character twice.
        ends: whether the text may end there.
    """

    steps: list[list[tuple[Ranges, int]]]
    ends: list[bool]


def states(source: Automaton, least: int, most: int | None, limit: int) -> States:
    """Of texts of so many characters. Raises UsageError where it has more states than `limit`."""
    numbers: dict[tuple[frozenset[int], int], int] = {}
    steps: list[list[tuple[Ranges, int]]] = []
    ends: list[bool] = []
    todo: list[tuple[frozenset[int], int]] = []

    def number(key: tuple[frozenset[int], int]) -> int:
        if key not in numbers:
            if len(numbers) == limit:
                raise UsageError("the pattern has too many states")
            numbers[key] = len(steps)
            steps.append([])
            ends.append(source.end in key[0] and key[1] >= least)
            todo.append(key)
        return numbers[key]

    number((_closure(source, {source.begin}), 0))
    # counted only as far as it matters
    last = least if most is None else most
    while todo:
        key = todo.pop()
        now, count = key
        if most is not None and count == most:
            continue
        by_target: dict[frozenset[int], list[tuple[int, int]]] = {}
        for piece, targets in _pieces(source, now):
            by_target.setdefault(_closure(source, targets), []).append(piece)
        for target, ranges in by_target.items():
            steps[numbers[key]].append((normal(ranges), number((target, min(count + 1, last)))))
    return _alive(steps, ends)


def _closure(source: Automaton, begin: Iterable[int]) -> frozenset[int]:
    found, todo = set(begin), list(begin)
    while todo:
        for state in source.free[todo.pop()]:
            if state not in found:
                found.add(state)
                todo.append(state)
    return frozenset(found)


def _pieces(source: Automaton, now: frozenset[int]) -> Iterator[tuple[tuple[int, int], set[int]]]:
    """The characters, cut so that all of a piece lead to the same states."""
    events: list[tuple[int, bool, int]] = []
    for state in now:
        for ranges, target in source.steps[state]:
            for low, high in _allowed(ranges):
                events += [(low, True, target), (high + 1, False, target)]
    events.sort()
    open_: dict[int, int] = {}
    begin = 0
    for at, opens, target in events:
        if at > begin and open_:
            yield (begin, at - 1), set(open_)
        begin = at
        open_[target] = open_.get(target, 0) + (1 if opens else -1)
        if not open_[target]:
            del open_[target]


def _allowed(ranges: Ranges) -> Iterator[tuple[int, int]]:
    """Those that can stand in a JSON text."""
    for low, high in ranges:
        for least, most in ANY:
            if low <= most and least <= high:
                yield max(low, least), min(high, most)


def _alive(steps: list[list[tuple[Ranges, int]]], ends: list[bool]) -> States:
    """Without the states from which no end is reached."""
    before: list[list[int]] = [[] for _ in steps]
    for state, found in enumerate(steps):
        for _, target in found:
            before[target].append(state)
    alive = {state for state, end in enumerate(ends) if end}
    todo = list(alive)
    while todo:
        for state in before[todo.pop()]:
            if state not in alive:
                alive.add(state)
                todo.append(state)
    if 0 not in alive:
        raise UsageError("no text matches the pattern and the length")
    return States([[(r, to) for r, to in found if to in alive] for found in steps], ends)
