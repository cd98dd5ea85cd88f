"""Keep a conversation in a file, and go on with it later, in another program.

python examples/keep.py save talk.chat "My name is Ada."
python examples/keep.py load talk.chat "What is my name?"
"""

import argparse

import caravan

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("what", choices=("save", "load"))
parser.add_argument("file")
parser.add_argument("text")
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--rpc", nargs="+", default=["local:CPU:1"] * 2, metavar="HOST:PORT")
parser.add_argument("--tokens", type=int, default=32, help="of the answer")
args = parser.parse_args()

with (
    caravan.connect(args.rpc) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Chat(model, sampling=caravan.SamplingParams(temp=0), max_tokens=args.tokens) as chat,
):
    if args.what == "load":
        try:
            whole = chat.load(args.file)
        except caravan.StateError as error:
            raise SystemExit(str(error)) from error
        print(f"{len(chat.messages)} messages, {'as they were' if whole else 'to be read again'}")
    for piece in chat.say(args.text):
        print(piece, end="", flush=True)
    print(f"\n({chat.stats.n_prompt} tokens read)")
    chat.save(args.file)
