"""What both sides compute in these tests, and how it is compared: bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from interop.peers import CppClient, Head

TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 20
STEPS = 4


@dataclass(frozen=True)
class Case:
    """A prompt of `n_prompt` tokens and STEPS greedy ones, in a context of these options."""

    n_prompt: int
    options: dict[str, Any] = field(default_factory=dict)

    def observe(self, peer: CppClient | Head) -> list[str]:
        """The logits after the prompt and after each step, then the tokens, as texts."""
        tokens = peer.ask("tokenize", text=TEXT)["tokens"][: self.n_prompt]
        peer.ask("open", context="case", n_ctx=128, **self.options)
        peer.ask("decode", context="case", tokens=tokens)
        first = peer.ask("logits", context="case")["logits"]
        steps = peer.ask("generate", context="case", n=STEPS, keep=True)
        peer.ask("close", context="case")
        return [first, *steps["logits"], str(steps["tokens"])]


CASES = {
    "ubatch divides": Case(64, {"n_ubatch": 16}),
    "ubatch does not divide": Case(61, {"n_ubatch": 27}),
    "ubatch of one": Case(5, {"n_ubatch": 1}),
    "longer than the batch": Case(90, {"n_batch": 48, "n_ubatch": 20}),
    "quantised cache": Case(
        50, {"n_ubatch": 32, "type_k": "q8_0", "type_v": "q8_0", "flash_attn": "on"}
    ),
    "quantised keys alone": Case(50, {"n_ubatch": 13, "type_k": "q8_0"}),
    "flash attention off": Case(50, {"n_ubatch": 16, "flash_attn": "off"}),
    "flash attention on": Case(50, {"n_ubatch": 16, "flash_attn": "on"}),
    "cache not on the devices": Case(40, {"n_ubatch": 16, "offload_kqv": False}),
}
SOME = ("ubatch does not divide", "quantised cache")

Seen = dict[str, list[str]]


def observe(
    peer: CppClient | Head,
    endpoints: Sequence[str],
    model: Path,
    cases: Sequence[str] = tuple(CASES),
    **load: Any,
) -> Seen:
    """All of the cases, over the devices of the endpoints; with none on the peer's own CPU."""
    if endpoints:
        peer.ask("connect", endpoints=list(endpoints))
    peer.ask("load", path=str(model), **load)
    return {name: CASES[name].observe(peer) for name in cases}


def shifting(tokens: list[int]) -> list[dict[str, Any]]:
    """Steps in a small context whose beginning is forgotten again and again."""
    steps: list[dict[str, Any]] = [{"do": "open", "n_ctx": 64, "n_ubatch": 16}]
    for start, end in ((0, 40), (40, 60), (60, 80)):
        steps += [{"do": "decode", "tokens": tokens[start:end]}, {"do": "logits"}]
        steps += [{"do": "shift", "n": 20}, {"do": "generate", "n": 2, "keep": True}]
    return steps


def told(peer: CppClient | Head, steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The answers to steps, without the times that they took."""
    answers = [peer.ask(**step) for step in steps]
    return [{key: answer[key] for key in answer if key != "seconds"} for answer in answers]


def assert_same(seen: Seen, expected: Seen) -> None:
    for name, values in seen.items():
        for step, (ours, theirs) in enumerate(zip(values, expected[name], strict=True)):
            assert ours == theirs, f"{name}, step {step} differs"
