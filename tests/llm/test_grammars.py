"""Grammars: what the engine reads is read here, what it would not survive is refused."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from caravan.errors import SamplingError, UsageError
from caravan.llm import Model
from caravan.llm.candidates import Candidates
from caravan.llm.constraint import Constraint
from caravan.llm.grammar.gbnf import Chars, Ref, Repeat, parse
from caravan.llm.grammar.plain import plain
from caravan.llm.grammar.safety import require_safe


def fits(model: Model, grammar: str, text: str) -> bool:
    """Whether the engine lets the tokens of a text pass, and end there."""
    constraint = Constraint(grammar, model)
    try:
        for token in model.tokenize(text, add_special=False, parse_special=False):
            if not constraint.allows(token):
                return False
            constraint.accept(token)
        return constraint.allows(model.words.eog[0])
    finally:
        constraint.close()


def test_rules_are_read():
    rules = parse('root ::= "ab"* x{2,} # all\nx ::=\n  [^a-z\\n] | (. root)? |\n')
    a, b = (Chars(((ord(c), ord(c)),)) for c in "ab")
    assert rules["root"] == [(Repeat((a, b), 0, None), Repeat((Ref("x"),), 2, None))]
    group = next(name for name in rules if name.startswith("x_"))
    assert rules["x"] == [
        (Chars(((ord("a"), ord("z")), (10, 10)), negated=True),),
        (Repeat((Ref(group),), 0, 1),),
        (),
    ]
    assert rules[group] == [(Chars((), negated=True), Ref("root"))]


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a" | "bc"+', ["a", "bc", "bcbc"], ["", "b", "ab"]),
        ("root ::= [a-c]{2,3}", ["ab", "abc"], ["a", "abcc", "xy"]),
        ("root ::= [^a]{2}", ["bé", "😀b"], ["a", "ba"]),
        ('root ::= ("a"*)*', ["", "aaa"], ["b"]),
        ('root ::= "(" root ")" | "x"', ["x", "((x))"], ["(x", "()"]),
        ('root ::= x{0} "y" z?\nx ::= "x"\nz ::= "z"', ["y", "yz"], ["xy"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\"\\\\\\n\\t\\r\\[\\]"', ['Aé😀"\\\n\t\r[]'], ["A"]),
        ('\n# why\nroot ::= a | # first\n  b\na ::= "a"\r\nb ::= "b" # second', ["a", "b"], ["ab"]),
        ("root ::= [\\]\\[\\-a]*", ["]-[a"], ["b"]),
        ("root ::= [a-]*", ["-a"], ["b"]),
    ],
)
def test_the_engine_reads_it_in_the_same_way(model, grammar, good, bad):
    for text in good:
        assert fits(model, grammar, text), text
    for text in bad:
        assert not fits(model, grammar, text), text


REFUSED = {
    "": "no rule named root",
    'main ::= "a"': "no rule named root",
    "root ::= nothing": "rule nothing is not defined",
    'root ::= "a" nothing{0}': "rule nothing is not defined",
    "root ::= [a": "unexpected end",
    'root ::= "a': "unexpected end",
    'root ::= "a" )': "the end of the line",
    'root ::= ("a"': "closing parenthesis",
    'root "a"': "::= is expected",
    'root ::= "\\q"': "escape",
    'root ::= "\\u12"': "escape",
    'root ::= "\\U00110000"': "beyond Unicode",
    "root ::= *": "nothing to repeat",
    'root ::= "a"{0}*': "nothing to repeat",
    'root ::= "a"**': "parentheses",
    'root ::= "a"{3': "closing brace",
    'root ::= "a"{,3}': "number of repetitions",
    'root ::= "a"{3,2}': "fewer",
    'root ::= "a"{2001}': "more than 2000",
    'root ::= "a"{0,2001}': "more than 2000",
    'root ::= ("a"{0,1000}){3}': "too many",
    "root ::= []": "no characters",
    "root ::= [z-a]": "ends before it begins",
    "root ::= <[5]>": "tokens",
    "root ::= !<|im_start|>": "tokens",
    'root ::= "a"\nroot ::= "b"': "second time",
    "root ::= root": "nothing fulfils",
    'root ::= root "a" | "b"': "left recursion",
    'root ::= a root "x" | "y"\na ::= b\nb ::= ""': "left recursion",
    'root ::= ("" | "a") root': "nothing fulfils",
    'root ::= x root\nx ::= y\ny ::= ""': "nothing fulfils",
    "root ::= " + "(" * 100 + '"a"' + ")" * 100: "nested too deeply",
    "root ::= " + '"a' + "a" * 2000 + '"{1999}': "too large",
    'root ::= "a\0"': "encoded",
    'root ::= "\ud800"': "encoded",
    "root ::= r0\n"
    + "\n".join(f'r{i} ::= r{i + 1} "a" | r{i + 1} "b"' for i in range(40))
    + '\nr40 ::= "c"': "too many ways",
    "root ::= r0\n"
    + "\n".join(f"r{i} ::= r{i + 1}" for i in range(8000))
    + '\nr8000 ::= "c"': "too many ways",
    "root ::= " + " " * 300_000: "more than",
}


@pytest.mark.parametrize("grammar", REFUSED, ids=list(map(str, range(len(REFUSED)))))
def test_what_cannot_be_used_is_told(model, grammar):
    with pytest.raises(UsageError, match="grammar") as caught:
        Constraint(grammar, model)
    assert REFUSED[grammar] in str(caught.value)
    assert len(str(caught.value)) < 200


def test_an_error_tells_the_line():
    with pytest.raises(UsageError, match=r"line 3: .* at '}'"):
        parse('root ::= a\na ::= "b"\n}')


def test_long_repetitions_are_quick(model):
    began = time.thread_time()
    constraint = Constraint('root ::= x{0,2000} "!"\nx ::= [a-z] | [0-9] [0-9]', model)
    for token in model.tokenize("hello 12 abc"[:5], add_special=False):
        constraint.accept(token)
    constraint.close()
    assert time.thread_time() - began < 10


@pytest.mark.parametrize(
    "grammar",
    [
        # in a word of n letters there are 4 to the n ways to have come to its end
        "root ::= (a | b | c | d)* [0-9]\na ::= [a-z]\nb ::= [a-z]\nc ::= [a-z]\nd ::= [a-z]",
        'root ::= a\na ::= "=" a "x" | "=" a "y" | "=" a "z" | "=" a a | "="',
    ],
)
def test_a_token_that_could_be_read_in_too_many_ways_is_never_given_to_the_engine(model, grammar):
    constraint = Constraint(grammar, model)
    candidates = Candidates(model.n_vocab)
    candidates.fill(np.zeros(model.n_vocab, np.float32))
    with pytest.raises(SamplingError, match="ambiguous"):
        constraint.restrict(candidates)
    with pytest.raises(SamplingError, match="ambiguous"):
        for text in ("communications", "=" * 32):
            (token,) = model.tokenize(text, add_special=False)
            constraint.allows(token)
    constraint.close()


# anything at all


def _item(rng: random.Random, depth: int) -> str:
    kind = rng.randrange(10)
    if kind < 3:
        return '"' + rng.choice(["a", "ab", "", "é", "\\n", "x"]) + '"'
    if kind < 5:
        return rng.choice(["[a-z]", "[^a-c]", ".", "[\\]a-]", "[😀é]"])
    if kind < 8:
        return rng.choice(["root", "a", "b", "c"])
    return "(" + _alternatives(rng, depth + 1) + ")" if depth < 3 else '"q"'


def _alternatives(rng: random.Random, depth: int) -> str:
    times = ["", "", "", "", "*", "+", "?", "{2}", "{0}", "{1,}", "{0,3}", "{2,5}"]
    return " | ".join(
        " ".join(_item(rng, depth) + rng.choice(times) for _ in range(rng.randrange(4)))
        for _ in range(rng.randrange(1, 4))
    )


def _grammar(rng: random.Random) -> str:
    text = "\n".join(f"{name} ::= {_alternatives(rng, 0)}" for name in ("root", "a", "b", "c"))
    if rng.random() < 0.3:
        chars = list(text)
        for _ in range(rng.randrange(1, 4)):
            chars[rng.randrange(len(chars))] = rng.choice(["", *'()"|*{}[]\\\n-<'])
        text = "".join(chars)
    return text


@pytest.mark.parametrize("seed", range(3))
def test_no_grammar_ends_the_process_and_what_is_read_here_the_engine_reads(model, seed):
    rng = random.Random(seed)
    tokens = [model.tokenize(text, add_special=False)[0] for text in "abqxé]"] + [0, 2]
    n_read = 0
    for _ in range(400):
        grammar = _grammar(rng)
        try:
            require_safe(plain(parse(grammar)))
        except UsageError:
            continue
        n_read += 1
        constraint = Constraint(grammar, model)
        try:
            for _ in range(8):
                some = [t for t in rng.sample(range(300, 20_000), 100) + tokens]
                allowed = [t for t in some if constraint.allows(t)]
                if not allowed:
                    break
                constraint.accept(rng.choice(allowed))
        except SamplingError:
            pass
        finally:
            constraint.close()
    assert n_read > 5
