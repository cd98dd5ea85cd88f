"""Several prompts at the same time through one model: asyncio and a Batcher.

python examples/several.py "The capital of France is" "One, two," "The opposite of hot is"
"""

import argparse
import asyncio

import caravan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "prompts",
    nargs="*",
    default=["The capital of France is", "One, two, three,", "The opposite of hot is"],
)
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--rpc", nargs="+", default=["local:CPU:1"] * 2, metavar="HOST:PORT")
parser.add_argument("--tokens", type=int, default=16, help="of each answer")
args = parser.parse_args()


async def answer(batcher: caravan.Batcher, prompt: str) -> int:
    """Print the answer when it is there; how many tokens it has."""
    tokens = tuple(batcher.model.tokenize(prompt))
    greedy = caravan.SamplingParams(temp=0)
    request = caravan.Request(tokens, max_tokens=args.tokens, sampling=greedy)
    chunks = [chunk async for chunk in caravan.aiterate(batcher, request)]
    text = "".join(chunk.text for chunk in chunks)
    usage = chunks[-1].usage
    assert usage is not None
    print(f"{prompt!r} ->{text!r} ({chunks[-1].finish}, {usage.n_gen} tokens)")
    return usage.n_gen


async def main(batcher: caravan.Batcher) -> None:
    counts = await asyncio.gather(*(answer(batcher, prompt) for prompt in args.prompts))
    print(f"{sum(counts)} tokens in {batcher.state().n_steps} steps")


with (
    caravan.connect(args.rpc) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Batcher(model, n_slots=4, n_ctx=512) as batcher,
):
    asyncio.run(main(batcher))
