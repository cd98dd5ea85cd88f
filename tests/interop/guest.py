"""A program of llama-cpp-python: what its `Llama` answers, with and without Caravan's workers.

    python tests/interop/guest.py MODEL OUT.npz [ENDPOINT…]

Writes numbers and texts to OUT; those of the CPU alone if no endpoint is given, with weights as the
file has them, as workers keep them. What llama.cpp says goes to stderr.
"""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp
import numpy as np

TEXT = "The caravan left the oasis before dawn, and nobody looked back. " * 40
STEPS = 6


def main(path: str, out: str, *endpoints: str) -> None:
    layers = 0
    if endpoints:
        import caravan

        caravan.register(endpoints)
        layers = -1
    else:
        _keep_weights_plain()

    def load(**options: Any) -> llama_cpp.Llama:
        sizes = {"n_ctx": 256, "n_batch": 64, "n_ubatch": 16, "n_threads": 1, "n_threads_batch": 1}
        return llama_cpp.Llama(model_path=path, n_gpu_layers=layers, **{**sizes, **options})

    found: dict[str, Any] = {}
    llm = load(logits_all=True)
    found.update(logits(llm))
    found.update(state(llm))
    found.update(two_at_once(llm, load(n_ctx=128)))
    found["chat"] = chat(llm)
    found["embedding"] = np.array(load(embedding=True).embed("Nobody looked back."))
    np.savez(out, **found)


def _keep_weights_plain() -> None:
    defaults = llama_cpp.llama_model_default_params

    def plain() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_model_default_params = plain


def logits(llm: llama_cpp.Llama) -> dict[str, Any]:
    """Of all tokens of a prompt of several batches and micro-batches, and of greedy steps."""
    tokens = llm.tokenize(TEXT.encode())[:100]
    llm.eval(tokens)
    for _ in range(STEPS):
        llm.eval([int(llm.scores[llm.n_tokens - 1].argmax())])
    return {"logits": llm.scores[: llm.n_tokens].copy(), "tokens": llm.input_ids[: llm.n_tokens]}


def state(llm: llama_cpp.Llama) -> dict[str, Any]:
    """A conversation that is put away, disturbed and taken up again."""
    saved = llm.save_state()
    llm.reset()
    llm.eval(llm.tokenize(b"Something else entirely"))
    llm.load_state(saved)
    llm.eval([905])
    return {"restored": llm.scores[llm.n_tokens - 1].copy(), "size": llm.n_tokens}


def two_at_once(one: llama_cpp.Llama, other: llama_cpp.Llama) -> dict[str, Any]:
    """Two models, one token of each in turn."""
    texts = [b"The capital of France is", b"One, two, three,"]
    made: list[list[int]] = [[], []]
    streams = [
        llm.generate(llm.tokenize(text), temp=0.0)
        for llm, text in zip((one, other), texts, strict=True)
    ]
    for _ in range(8):
        for stream, tokens in zip(streams, made, strict=True):
            tokens.append(next(stream))
    return {"two at once": np.array(made)}


def chat(llm: llama_cpp.Llama) -> str:
    messages: Any = [{"role": "user", "content": "Name a colour."}]
    chunks = llm.create_chat_completion(messages, stream=True, max_tokens=12, temperature=0.0)
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)


if __name__ == "__main__":
    main(*sys.argv[1:])
