"""Jinja for templates that nobody has looked at: they come with model files from anywhere.

Beside the sandbox, which keeps them from Python's insides, all is bounded: the time, the length of
every text and the size of every list, before they are made. Called by `chat`, and loaded with it
only.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

SECONDS = 10.0
MOST_TEXT = 1 << 24
MOST_ITEMS = 1 << 19
# of all texts that are made on the way: they may be there at the same time
MOST_MADE = 1 << 29
_MOST_WIDTH = 10_000
_MOST_BITS = 4096
_WIDTH = re.compile(r"\d{5}|\*|\{[^{}]*\{")
# what makes more of what it is given, by a number that it is given
_WIDE = ("batch", "center", "filesizeformat", "indent", "slice", "truncate", "wordwrap")
_WIDE_METHODS = ("center", "expandtabs", "ljust", "rjust", "zfill")
# what makes a text of anything
_OF_TEXTS = ("e", "escape", "forceescape", "format", "join", "replace", "string", "trim", "upper")
# of no use for prompts
_WITHOUT = ("pprint", "urlize", "xmlattr")


class _Generation(Extension):
    """`{% generation %}`, which marks answers for training: here it is what stands inside."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Environment(ImmutableSandboxedEnvironment):
    """See the module. Several threads may render at the same time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
            finalize=self.measured,
        )
        self._own = threading.local()
        for name in _WITHOUT:
            del self.filters[name]
        self.filters["tojson"] = self._to_json
        self.filters = {name: self._bounded(name, made) for name, made in self.filters.items()}
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        self.concat = self._joined  # type: ignore[method-assign]

    def from_string(self, *args: Any, **kwargs: Any) -> Template:
        """See jinja2. What is constant in a template is computed now."""
        self._begin()
        return super().from_string(*args, **kwargs)

    def render(self, template: Template, variables: dict[str, Any]) -> str:
        """The text. Raises whatever goes wrong in it, in time."""
        self._begin()
        context = template.new_context(variables)
        return self._joined(template.root_render_func(context))

    # bounds

    def _begin(self) -> None:
        self._own.deadline = time.monotonic() + SECONDS
        self._own.left = MOST_MADE

    def _spend(self, size: int) -> None:
        self._own.left -= size
        if self._own.left < 0:
            raise TemplateError(f"it makes texts of more than {MOST_MADE} characters in all")

    def check(self) -> None:
        if time.monotonic() > self._own.deadline:
            raise TemplateError(f"it takes more than {SECONDS:g} seconds")

    def measured(self, value: Any) -> Any:
        """It, if it is not too large with all that it contains, as often as it contains that."""
        if isinstance(value, str):
            _check_text(len(value))
            self._spend(len(value))
        elif isinstance(value, (list, tuple, dict, Namespace)):
            _weigh(value)
        elif isinstance(value, Iterator):
            return self._measured_items(value)
        return value

    def _measured_items(self, items: Iterator[Any]) -> Iterator[Any]:
        """What makes items when it is asked for them."""
        for number, item in enumerate(items):
            self.check()
            if number >= MOST_ITEMS:
                raise TemplateError(f"it makes more than {MOST_ITEMS} items")
            yield self.measured(item)

    def steps(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items of a loop, as long as there is time."""
        for item in items:
            self.check()
            yield item

    def text(self, *parts: Any) -> str:
        """What `~` makes."""
        return self._joined(str(self.measured(part)) for part in parts)

    def _joined(self, parts: Iterable[str]) -> str:
        found, size = [], 0
        for part in parts:
            size += len(part)
            _check_text(size)
            found.append(part)
        self._spend(size)
        return "".join(found)

    # where they are looked at

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _rewrite(tree, self)
        return tree

    def asked(self, method: str, values: list[Any], at: nodes.Node) -> nodes.Call:
        """A call of a method of this, in a template."""
        function = nodes.EnvironmentAttribute(method, lineno=at.lineno)
        call = nodes.Call(function, values, [], None, None, lineno=at.lineno)
        call.set_environment(self)
        return call

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        __self.check()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = ([*args[0]], *args[1:])
            _check_method(owner, __obj.__name__, args)
        return __self.measured(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        self.check()
        _check_operator(operator, left, right)
        return self.measured(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        made = super().wrap_str_format(value)
        if made is None:
            return None
        own = value.__self__

        @wraps(made)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_format(own, [*args, *kwargs.values()])
            return made(*args, **kwargs)

        return bounded

    def _bounded(self, name: str, made: Callable[..., Any]) -> Callable[..., Any]:
        # with what `wraps` copies jinja knows that some want the environment before the value
        first = 1 if hasattr(made, "jinja_pass_arg") else 0

        @wraps(made)
        def bounded(*args: Any, **kwargs: Any) -> Any:
            self.check()
            value, *others = args[first:]
            if name in _OF_TEXTS:
                value = self.measured(value)
                if name == "join":
                    value = [*value]
                args = (*args[:first], value, *others)
            _check_filter(name, value, [*others, *kwargs.values()])
            return self.measured(made(*args, **kwargs))

        return bounded

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | str | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as it stands, without regard to HTML."""
        encoder = json.JSONEncoder(
            ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        if isinstance(indent, int):
            _check_width(indent)
        return self._joined(encoder.iterencode(value))


def _rewrite(node: Any, environment: Environment) -> Any:
    """A template whose loops are timed, and whose lists and joined texts are measured."""
    for name, value in [*node.iter_fields()]:
        if isinstance(value, list):
            value[:] = [
                _rewrite(one, environment) if isinstance(one, nodes.Node) else one for one in value
            ]
        elif isinstance(value, nodes.Node):
            setattr(node, name, _rewrite(value, environment))
    if isinstance(node, nodes.For):
        node.iter = environment.asked("steps", [node.iter], node)
    if isinstance(node, nodes.Concat):
        return environment.asked("text", node.nodes, node)
    is_made = isinstance(node, (nodes.List, nodes.Dict)) or (
        isinstance(node, nodes.Tuple) and node.ctx == "load"
    )
    if is_made and any(not isinstance(child, nodes.Const) for child in node.iter_child_nodes()):
        return environment.asked("measured", [node], node)
    return node


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _check_text(size: int) -> None:
    if size > MOST_TEXT:
        raise TemplateError(f"it makes a text of more than {MOST_TEXT} characters")


def _weigh(value: Any) -> None:
    left, items, size = [value], 0, 0
    while left:
        one = left.pop()
        items += 1
        if items > MOST_ITEMS:
            raise TemplateError(f"it makes something of more than {MOST_ITEMS} items")
        if isinstance(one, str):
            size += len(one)
            _check_text(size)
        elif isinstance(one, (list, tuple)):
            left += one
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, Namespace):
            left += object.__getattribute__(one, "_Namespace__attrs").values()


def _size(value: Any) -> int:
    """Characters of it as text, about."""
    return len(value) if isinstance(value, str) else len(str(value))


def _check_width(*values: Any) -> None:
    if any(isinstance(value, int) and abs(value) > _MOST_WIDTH for value in values):
        raise TemplateError(f"it wants a width of more than {_MOST_WIDTH}")


def _check_format(form: str, values: Iterable[Any]) -> None:
    if _WIDTH.search(form):
        raise TemplateError(f"the format {form[:40]!r} is not supported")
    widths = map(int, re.findall(r"\d+", form))
    most = max((*map(_size, values), *widths), default=0)
    _check_text((len(form) // 2 + 1) * most)


def _check_method(own: str, name: str, args: tuple[Any, ...]) -> None:
    if name in _WIDE_METHODS:
        _check_width(*args)
        _check_text(own.count("\t") * max((a for a in args if isinstance(a, int)), default=8))
    elif name == "replace" and len(args) > 1:
        _check_replace(own, args[0], args[1])
    elif name == "join" and args and isinstance(args[0], (list, tuple, str)):
        _check_text(len(own) * len(args[0]))
    elif name == "translate":
        raise TemplateError("translate is not supported")


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if isinstance(text, str) and isinstance(old, str):
        _check_text(len(text) + text.count(old) * _size(new))


def _check_filter(name: str, value: Any, others: list[Any]) -> None:
    if name in _WIDE:
        _check_width(*others)
        text = value.count("\n") + value.count(" ") if isinstance(value, str) else 0
        _check_text(text * max((o for o in others if isinstance(o, int)), default=0))
        _check_text(max((_size(value) * len(o) for o in others if isinstance(o, str)), default=0))
    elif name == "replace" and len(others) > 1:
        _check_replace(value, others[0], others[1])
    elif name == "format":
        _check_format(str(value), others)
    elif name == "join" and others and isinstance(value, (list, tuple, str)):
        _check_text(len(value) * _size(others[0]))


def _check_operator(operator: str, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * right if operator == "**" else left.bit_length()
        if bits + right.bit_length() > _MOST_BITS:
            raise TemplateError("it makes a number that is too large")
    elif operator == "*":
        pair = (left, right) if isinstance(right, int) else (right, left)
        if isinstance(pair[0], (str, list, tuple)) and isinstance(pair[1], int):
            most = MOST_TEXT if isinstance(pair[0], str) else MOST_ITEMS
            if len(pair[0]) * pair[1] > most:
                raise TemplateError("it makes something that is too large")
    elif operator == "%" and isinstance(left, str):
        _check_format(left.replace("%%", ""), right if isinstance(right, tuple) else (right,))


__all__ = ["MOST_ITEMS", "MOST_MADE", "MOST_TEXT", "SECONDS", "Environment", "TemplateError"]
