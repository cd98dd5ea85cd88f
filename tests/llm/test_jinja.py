"""Templates that mean harm, or are only unlucky: all end, with an error that says why."""

from __future__ import annotations

import json
import threading

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError

from caravan.llm import jinja
from caravan.llm.jinja import Environment


def rendered(source: str, **variables) -> str:
    environment = Environment()
    return environment.render(environment.from_string(source), variables)


DOUBLED = "{{% set ns = namespace(x={0}) %}}{{% for i in range(64) %}}{{% set ns.x = {1} %}}"
DOUBLED += "{{% endfor %}}{{{{ ns.x }}}}"


@pytest.mark.parametrize(
    "source",
    [
        DOUBLED.format("'aa'", "ns.x ~ ns.x"),
        DOUBLED.format("'aa'", "ns.x + ns.x"),
        DOUBLED.format("'aa'", "ns.x * 2"),
        DOUBLED.format("'aa'", "'%s%s' % (ns.x, ns.x)"),
        DOUBLED.format("'aa'", "'{0}{0}'.format(ns.x)"),
        DOUBLED.format("'aa'", "'%s%s'|format(ns.x, ns.x)"),
        DOUBLED.format("'aa'", "ns.x|replace('a', ns.x)"),
        DOUBLED.format("'aa'", "ns.x.replace('a', ns.x)"),
        DOUBLED.format("'aa'", "ns.x.join(ns.x)"),
        DOUBLED.format("'aa'", "ns.x|join(ns.x)"),
        DOUBLED.format("'aa'", "[ns.x, ns.x]|join"),
        DOUBLED.format("[1]", "[ns.x, ns.x]"),
        DOUBLED.format("[1]", "(ns.x, ns.x)"),
        DOUBLED.format("[1]", "{'a': ns.x, 'b': ns.x}"),
        DOUBLED.format("[1]", "dict(a=ns.x, b=ns.x)"),
        DOUBLED.format("[1]", "ns.x + ns.x"),
        DOUBLED.format("[1]", "ns.x * 2"),
        DOUBLED.format("3", "ns.x * ns.x"),
        DOUBLED.format("3", "ns.x ** ns.x"),
        "{% set ns = namespace(x='aa') %}{% for i in range(64) %}{% set y %}{{ ns.x }}{{ ns.x }}"
        "{% endset %}{% set ns.x = y %}{% endfor %}",
        "{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}",
        "{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(1) }}",
        "{% for i in [1, 2] recursive %}{{ loop([1, 2]) }}{% endfor %}",
        "{{ range(1000000000) }}",
        "{{ range(99999)|map('center', 9999)|list|length }}",
        "{{ range(99999)|map('string')|join('x' * 99999) }}",
        "{{ ('x' * 99999).join(range(99999)|map('string')) }}",
        "{% set a = range(9999)|list %}{{ a|map('string')|join('x' * 99999) }}",
        "{{ '%.9999f' * 999 % range(999)|list }}",
        "{{ ('%9999d' * 9999)|format(1) }}",
        "{% macro f(s) %}{{ f(s ~ 'a') }}{% endmacro %}{{ f('a' * 9999999) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{{ [1] * 10 ** 10 }}",
        "{{ (10 ** 10) ** 10000 }}",
        "{{ 'a'.ljust(10 ** 10) }}",
        "{{ 'a'|center(10 ** 10) }}",
        "{{ 'a\nb'|indent(10 ** 10) }}",
        "{{ 'a'|slice(10 ** 10)|list }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (10 ** 10, 1) }}",
        "{{ '{:10000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 10) }}",
        "{{ [1]|tojson(indent=10 ** 10) }}",
    ],
)
def test_what_would_be_endless_or_huge_is_an_error(source, monkeypatch):
    monkeypatch.setattr(jinja, "MOST_ITEMS", 1 << 14)
    monkeypatch.setattr(jinja, "MOST_MADE", 1 << 26)
    with pytest.raises((TemplateError, OverflowError, RecursionError)):
        rendered(source)


def test_lists_that_are_made_when_they_are_wanted():
    source = "{{ x|map('upper')|reject('equalto', 'B')|join('-') }} {{ '+'.join(x|map('lower')) }}"
    assert rendered(source, x="abc") == "A-C a+b+c"
    assert rendered("{{ x|batch(2)|map('join')|list }}", x="abc") == "['ab', 'c']"


def test_a_loop_that_makes_nothing_ends_too(monkeypatch):
    monkeypatch.setattr(jinja, "SECONDS", 0.05)
    with pytest.raises(TemplateError, match=r"it takes more than 0\.05 seconds"):
        rendered("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")


@pytest.mark.parametrize(
    "source",
    ["{{ x.append(1) }}", "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}"],
)
def test_what_the_sandbox_keeps_from_templates(source):
    with pytest.raises(SecurityError):
        rendered(source, x=[])


def test_json_is_as_it_stands():
    value = {"b": "<ä>'&", "a": [1, None, True]}
    assert json.loads(rendered("{{ x|tojson }}", x=value)) == value
    assert rendered("{{ x|tojson }}", x=value) == '{"b": "<ä>\'&", "a": [1, null, true]}'
    assert rendered("{{ x|tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert rendered("{{ {'b': 1, 'a': 'ä'}|tojson(ensure_ascii=true, sort_keys=true) }}") == (
        '{"a": "\\u00e4", "b": 1}'
    )


def test_what_templates_use_beside_the_language():
    assert len(rendered("{{ strftime_now('%d %b %Y') }}")) == 11
    with pytest.raises(TemplateError, match="not so"):
        rendered("{{ raise_exception('not so') }}")
    loops = "{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}"
    assert rendered(loops + "{% break %}{% endif %}{{ i }}{{ loop.last }} {% endfor %}") == (
        "0False 2False 3False "
    )
    assert rendered("a{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}b") == "a1b"
    assert rendered("  {% if true %}\nx\n  {% endif %}\n") == "x\n"
    tree = [{"n": 1, "c": [{"n": 2, "c": []}, {"n": 3, "c": []}]}]
    nested = "{% for t in x recursive %}{{ t.n }}({{ loop(t.c) }}){{ loop.length }}{% endfor %}"
    assert rendered(nested, x=tree) == "1(2()23()2)1"


def test_threads_have_each_their_own_time():
    environment = Environment()
    template = environment.from_string("{% for m in x %}{{ m }}{% endfor %}")
    texts = []

    def render() -> None:
        texts.append(environment.render(template, {"x": ["a"] * 100}))

    threads = [threading.Thread(target=render) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["a" * 100] * 4
