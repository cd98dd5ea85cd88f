"""An answer that is JSON of a given form: a grammar leaves the model no other way.

python examples/json_schema.py "Ada Lovelace was born in London in 1815."
"""

import argparse
import json

import caravan
from caravan.llm.grammar import json_schema_grammar

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("text", nargs="?", default="Ada Lovelace was born in London in 1815.")
parser.add_argument("--model", default="smollm2", help="a GGUF file, or a sample's name")
parser.add_argument("--rpc", nargs="+", default=["local:CPU:1"] * 2, metavar="HOST:PORT")
args = parser.parse_args()

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "born": {"type": "integer", "minimum": 0, "maximum": 2100},
        "city": {"enum": ["London", "Paris", "Rome"]},
    },
    "required": ["name", "born", "city"],
    "additionalProperties": False,
}

with (
    caravan.connect(args.rpc) as cluster,
    caravan.Model(args.model, devices=cluster.devices) as model,
    caravan.Context(model, caravan.ContextParams(n_ctx=512)) as context,
):
    sampling = caravan.SamplingParams(temp=0, grammar=json_schema_grammar(SCHEMA))
    prompt = f"{args.text}\nAs JSON:\n"
    text = "".join(caravan.generate(context, prompt, max_tokens=120, sampling=sampling))
    print(text)
    found = json.loads(text)
    print(found["name"], found["born"], found["city"], sep=" | ")
