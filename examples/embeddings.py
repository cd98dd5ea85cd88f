"""Which of some sentences says most nearly the same as another one: embeddings.

python examples/embeddings.py "The cat sleeps on the sofa."
Models that were made for it do this best; others give the mean of what they think of the tokens.
"""

import argparse

import caravan

SENTENCES = [
    "A kitten is lying on the couch.",
    "The stock market fell sharply on Monday.",
    "Water boils at a hundred degrees.",
]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", default="The cat sleeps on the sofa.")
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--rpc", nargs="+", default=["local:CPU:1"] * 2, metavar="HOST:PORT")
args = parser.parse_args()

with (
    caravan.connect(args.rpc) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Embedder(model) as embedder,
):
    texts = [args.text, *SENTENCES]
    # of length 1 each, so that a product is the cosine of the angle between two
    vectors = embedder.embed([model.tokenize(text) for text in texts])
    print(f"{len(vectors)} vectors of {vectors.shape[1]} numbers")
    similar = vectors[1:] @ vectors[0]
    for number in (-similar).argsort():
        print(f"{similar[number]:.3f}  {SENTENCES[number]}")
