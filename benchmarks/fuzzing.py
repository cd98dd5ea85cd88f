"""The long form of the fuzz in `tests/fuzz`: mutated messages to a live worker, in pieces.

    python benchmarks/fuzzing.py --messages 1000000

`--seconds` bounds a part of it, which another `--seed` continues. What it finds goes into the
directory of `--findings`, a file a message; the exit code is 1 then.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def main() -> int:
    from fuzz.driver import Finding, run

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--piece", type=int, default=20_000, help="messages between two checks")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--findings", type=Path, default=Path("findings"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        try:
            fuzzer = run(Path(folder), args.messages, args.seed, args.piece, args.seconds)
        except Finding as exc:
            print(f"seed {args.seed}: {exc}")
            return 1
    print(f"seed {args.seed}:", "\n".join(fuzzer.told))
    found = [crash for crash in fuzzer.inquest.crashes if not crash.data]
    for crash in fuzzer.inquest.crashes:
        kind = "by data" if crash.data else "FOUND"
        print(f"  {kind}: {crash.session}, command {crash.number} {crash.op}: {crash.reason}")
    for number, crash in enumerate(found):
        args.findings.mkdir(exist_ok=True)
        name = f"{args.seed}-{number}-{crash.number}-{crash.op}"
        (args.findings / name).write_bytes(crash.payload)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
