"""A grammar's rules without repetitions, as the engine unfolds them.

Called by `constraint`, for `safety` and `ways`.
"""

from __future__ import annotations

from caravan.llm.grammar.gbnf import Chars, Item, Ref, Repeat, Rules

Plain = dict[str, list[tuple[Chars | Ref, ...]]]


def plain(rules: Rules) -> Plain:
    """With a rule of its own for each time that something may or may not be repeated."""
    found: Plain = {}
    for name, alternatives in rules.items():
        # in the order of the text, which errors are told in
        found[name] = []
        found[name] = [_flat(name, items, found) for items in alternatives]
    return found


def _flat(name: str, items: tuple[Item, ...], found: Plain) -> tuple[Chars | Ref, ...]:
    flat: list[Chars | Ref] = []
    for item in items:
        if not isinstance(item, Repeat):
            flat.append(item)
            continue
        unit = _flat(name, item.unit, found)
        flat += unit * item.least
        rest: tuple[Ref, ...] = ()
        for _ in range(1 if item.most is None else item.most - item.least):
            own = Ref(f"{name}_repeated_{len(found)}")
            found[own.name] = [(*unit, own) if item.most is None else (*unit, *rest), ()]
            rest = (own,)
        flat += rest
    return tuple(flat)
