"""What the processes of this folder that compute have in common: they are told step by step.

A step is a line of JSON on stdin, `{"do": NAME, ...}`; its answer is a line of JSON on stdout. A
step that raises is answered `{"error": WORDS, "kind": CLASS}`; one that ends the process, not at
all. The process ends with its stdin. Uses neither Caravan nor llama.cpp.
"""

from __future__ import annotations

import base64
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

Step = Callable[..., "dict[str, Any] | None"]


def serve(steps: dict[str, Step]) -> None:
    """Do what stdin says until it ends."""
    # what libraries print must not come between the answers
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        arguments = json.loads(line)
        begin = time.perf_counter()
        try:
            answer = steps[arguments.pop("do")](**arguments) or {}
        except Exception as exc:
            answer = {"error": str(exc), "kind": type(exc).__name__}
        answer["seconds"] = time.perf_counter() - begin
        print(json.dumps(answer), file=answers, flush=True)


def pack(logits: np.ndarray) -> str:
    """Logits as a text, without loss."""
    return base64.b64encode(logits.astype("<f4").tobytes()).decode()


def unpack(text: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text), "<f4")
