"""Coverage-guided: libFuzzer, through atheris, over `harness`. Options are libFuzzer's.

    PYTHONPATH=tests python -m fuzz.guided -runs=100000 [DIRECTORY]

Half of its changes are those of `mutate`, which knows what is in a message. It ends at the first
thing that comes out of a harness and is no error of ours, and writes the input that did it.
"""

from __future__ import annotations

import random
import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["caravan"]):
    from fuzz import harness

from caravan.wire.commands import Base, Ext
from fuzz.corpus import load
from fuzz.mutate import Mutator

_KNOWN = {
    harness.ext_graph: (0, Ext.GRAPH_COMPUTE),
    harness.ext_record: (0, Ext.INIT_TENSOR),
    harness.base_graph: (8, Base.GRAPH_COMPUTE),
    harness.base_record: (8, Base.INIT_TENSOR),
    harness.questions: (0, Ext.PEER_OPEN),
    harness.loads: (0, Ext.LOAD),
}


def mutated(data: bytes, most: int, seed: int) -> bytes:
    """libFuzzer's custom mutator: ours, or its own."""
    rng = random.Random(seed)
    which = harness.HARNESSES[data[0] % len(harness.HARNESSES)] if data else None
    if which not in _KNOWN or rng.random() < 0.5:
        return atheris.Mutate(data, most)
    protocol, number = _KNOWN[which]
    changed = data[:1] + Mutator(rng, protocol).payload(number, data[1:])
    return changed[:most]


def seeds(folder: Path) -> None:
    """The stored sessions as files, which is how libFuzzer wants them."""
    found = set(harness.first_words())
    for session in load():
        for message in session.messages:
            found.update(harness.inputs(session.protocol, message.number, message.payload))
    for number, data in enumerate(sorted(found)):
        (folder / f"{number:05}").write_bytes(data)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        seeds(Path(folder))
        options = ["-max_len=70000", "-timeout=30", "-rss_limit_mb=4096"]
        atheris.Setup(
            [sys.argv[0], *options, *sys.argv[1:], folder], harness.feed, custom_mutator=mutated
        )
        atheris.Fuzz()


if __name__ == "__main__":
    main()
