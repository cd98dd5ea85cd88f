"""A chat: the model's own template, and nothing of the conversation is read twice.

python examples/chat.py "What is the capital of France?" "And of Italy?"
"""

import argparse

import caravan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "questions", nargs="*", default=["What is the capital of France?", "And of Italy?"]
)
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--rpc", nargs="+", default=["local:CPU:1"] * 2, metavar="HOST:PORT")
parser.add_argument("--tokens", type=int, default=64, help="of each answer")
args = parser.parse_args()

with (
    caravan.connect(args.rpc) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Chat(
        model,
        system="You know geography.",
        sampling=caravan.SamplingParams(temp=0),
        max_tokens=args.tokens,
    ) as chat,
):
    for question in args.questions:
        print(">", question)
        for piece in chat.say(question):
            print(piece, end="", flush=True)
        print(f"\n  ({chat.stats.n_prompt} tokens read, {chat.stats.n_gen} written)")
