"""A head as a process of its own, which may be killed at any moment.

    python head.py MODEL SEED ENDPOINT

Prints a line for each session that went as it should; leaves with 1 when a result is a wrong one.
"""

from __future__ import annotations

import random
import sys

import numpy as np

import caravan
from caravan.errors import CaravanError
from caravan.llm import Context, ContextParams, Model, ModelParams

PARAMS = ContextParams(n_ctx=128, n_ubatch=8, n_batch=128, n_threads=1)
N_VOCAB = 259


class Wrong(Exception):
    """A worker computed something else than the engine does."""


def prompt_of(rng: random.Random) -> list[int]:
    return [rng.randrange(3, N_VOCAB) for _ in range(rng.randrange(1, 100))]


def session(endpoint: str, path: str, rng: random.Random, reference: Context) -> None:
    """Connect, load, compute some prompts, leave. Raises CaravanError, or Wrong."""
    with (
        caravan.connect([endpoint], timeout=20.0) as cluster,
        Model(path, ModelParams(repack=False), devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        for _ in range(rng.randrange(1, 4)):
            found = [
                logits(one, prompt) for prompt in [prompt_of(rng)] for one in (context, reference)
            ]
            if not np.array_equal(*found):
                raise Wrong(f"other logits than the engine's, at {endpoint}")


def logits(context: Context, prompt: list[int]) -> np.ndarray:
    context.clear()
    context.decode(prompt)
    for token in prompt[:3]:
        context.decode_one(token)
    return context.logits()


def main() -> int:
    path, seed, endpoint = sys.argv[1:]
    rng = random.Random(int(seed))
    with Model(path, ModelParams(repack=False)) as model, Context(model, PARAMS) as reference:
        while True:
            try:
                session(endpoint, path, rng, reference)
                print("session", flush=True)
            except CaravanError as exc:
                print(f"lost {exc}", flush=True)
            except Wrong as exc:
                print(exc, flush=True)
                return 1


if __name__ == "__main__":
    sys.exit(main())
