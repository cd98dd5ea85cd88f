"""Whether the engine survives a grammar that it can read, and in useful time.

Before each character the engine unfolds all rules that may come first, and keeps every way through
them. That has an end only if no rule comes back to itself with more behind it each time, something
is found only if every rule can be fulfilled, and it is fast only if the ways are few.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from caravan.errors import UsageError
from caravan.llm.grammar.gbnf import Chars, Ref
from caravan.llm.grammar.plain import Plain

_MOST_WAYS = 10_000
_MOST_CHAIN = 1_000


class _Edge(NamedTuple):
    """A rule that may come first in another.

    Attributes:
        grows: something comes behind it.
        direct: the engine's own check for left recursion sees it.
    """

    to: str
    grows: bool
    direct: bool


def require_safe(plain: Plain) -> None:
    """Raises UsageError, which says what is wrong with which rule."""
    for name in plain.keys() - _fulfilled(plain, empty=False):
        raise UsageError(f"grammar: nothing fulfils rule {_own(name)}")
    nullable = _fulfilled(plain, empty=True)
    edges = {name: list(_edges(plain[name], plain, nullable)) for name in plain}
    ways: dict[str, int] = {}
    chain: dict[str, int] = {}
    for group in _components({name: [edge.to for edge in edges[name]] for name in plain}):
        inside = set(group)
        within = [edge for name in group for edge in edges[name] if edge.to in inside]
        if any(edge.grows or edge.direct for edge in within):
            raise UsageError(f"grammar: rule {_own(group[0])} begins with itself (left recursion)")
        out = [edge.to for name in group for edge in edges[name] if edge.to not in inside]
        total = sum(len(plain[name]) for name in group) + sum(ways[name] for name in out)
        length = len(group) + max((chain[name] for name in out), default=0)
        if total > _MOST_WAYS or length > _MOST_CHAIN:
            raise UsageError(f"grammar: rule {_own(group[0])} can begin in too many ways")
        ways.update(dict.fromkeys(group, total))
        chain.update(dict.fromkeys(group, length))


def _own(name: str) -> str:
    """The name of the rule that a part of it was made for."""
    return name.partition("_")[0]


def _fulfilled(plain: Plain, empty: bool) -> set[str]:
    """Rules that some text fulfils; with `empty`, that the empty text does."""
    waiting: dict[str, list[tuple[str, int]]] = {}
    missing: list[int] = []
    found: set[str] = set()
    todo: list[str] = []

    def fulfil(name: str) -> None:
        if name not in found:
            found.add(name)
            todo.append(name)

    for name, alternatives in plain.items():
        for items in alternatives:
            if empty and any(isinstance(item, Chars) for item in items):
                continue
            names = {item.name for item in items if isinstance(item, Ref)}
            missing.append(len(names))
            for needed in names:
                waiting.setdefault(needed, []).append((name, len(missing) - 1))
            if not names:
                fulfil(name)
    while todo:
        for name, number in waiting.get(todo.pop(), ()):
            missing[number] -= 1
            if not missing[number]:
                fulfil(name)
    return found


def _edges(
    alternatives: list[tuple[Chars | Ref, ...]], plain: Plain, nullable: set[str]
) -> Iterator[_Edge]:
    for items in alternatives:
        direct = True
        for number, item in enumerate(items):
            if isinstance(item, Chars):
                break
            yield _Edge(item.name, number + 1 < len(items), direct)
            if item.name not in nullable:
                break
            # the engine takes only a rule with an empty alternative for one that may be empty
            direct = direct and () in plain[item.name]


def _components(graph: dict[str, list[str]]) -> Iterator[list[str]]:
    """The strongly connected ones (Tarjan's algorithm), those that others lead to first."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    on_path: set[str] = set()
    for root in graph:
        if root in number:
            continue
        calls: list[tuple[str, Iterator[str]]] = []

        def enter(name: str, calls: list[tuple[str, Iterator[str]]] = calls) -> None:
            number[name] = low[name] = len(number)
            path.append(name)
            on_path.add(name)
            calls.append((name, iter(graph[name])))

        enter(root)
        while calls:
            name, nexts = calls[-1]
            for other in nexts:
                if other not in number:
                    enter(other)
                    break
                if other in on_path:
                    low[name] = min(low[name], number[other])
            else:
                calls.pop()
                if calls:
                    low[calls[-1][0]] = min(low[calls[-1][0]], low[name])
                if low[name] == number[name]:
                    found = [path.pop()]
                    while found[-1] != name:
                        found.append(path.pop())
                    on_path.difference_update(found)
                    yield found
