"""Continue a text on two workers, and print it as it comes.

python examples/stream.py --rpc lab1:50052 lab2:50052
Without --rpc, two workers are started on this machine, as in all of these examples.
"""

import argparse

import caravan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("prompt", nargs="?", default="The capital of France is")
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--rpc", nargs="+", default=["local:CPU:1"] * 2, metavar="HOST:PORT")
parser.add_argument("--tokens", type=int, default=48)
args = parser.parse_args()

with (
    caravan.connect(args.rpc) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Context(model, caravan.ContextParams(n_ctx=1024)) as context,
):
    stats = caravan.GenerationStats()
    greedy = caravan.SamplingParams(temp=0)
    print(args.prompt, end="")
    for piece in caravan.generate(
        context, args.prompt, max_tokens=args.tokens, sampling=greedy, stats=stats
    ):
        print(piece, end="", flush=True)
    print()

    layers = model.layer_devices()
    for name in dict.fromkeys(layers):
        print(f"{name}: {layers.count(name)} layers")
    print(f"{stats.prompt_rate:.0f} tokens/s read, {stats.decode_rate:.0f} written")
