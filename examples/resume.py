"""A worker dies in the middle of a text, and the text goes on as if nothing had been.

python examples/resume.py
It starts two workers of its own, since it kills one of them.
"""

import argparse
import os
import signal

import caravan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--tokens", type=int, default=32)
args = parser.parse_args()

PROMPT = "One, two, three,"


def told(resumed: caravan.Resumed) -> None:
    print(f"\n[{resumed}]")


with (
    caravan.Worker("CPU:1") as one,
    caravan.Worker("CPU:1") as other,
    caravan.connect([one.endpoint, other.endpoint]) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Context(model, caravan.ContextParams(n_ctx=512)) as context,
):
    greedy = caravan.SamplingParams(temp=0)
    patience = caravan.Resume(wait=30.0, on_resume=told)
    texts = []
    for kill in (False, True):
        context.clear()
        print(PROMPT, end="")
        text = ""
        for number, piece in enumerate(
            caravan.generate(
                context, PROMPT, max_tokens=args.tokens, sampling=greedy, resume=patience
            )
        ):
            if kill and number == args.tokens // 2:
                os.kill(other.pid, signal.SIGKILL)
            text += piece
            print(piece, end="", flush=True)
        print()
        texts.append(text)
    print("the same text:", texts[0] == texts[1])
