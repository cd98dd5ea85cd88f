"""A worker under random heads, sessions and deaths for a long time; see `tests/soaking`.

    python benchmarks/soak.py --minutes 60

Ends with a verdict: the supervisor's memory is flat within 5 % after the first minute, and nothing
is left open. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def main() -> int:
    from soaking.driver import MOST_GROWTH, Soak

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-up", type=float, default=60.0, help="seconds that do not count")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two sessions")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(Path(folder), args.seed, args.heads, args.pause)
        try:
            soak.run(args.minutes * 60, lambda line: print(line, flush=True))
        finally:
            soak.close()
    growth = soak.growth(args.warm_up)
    last = soak.samples[-1]
    print(f"seed {args.seed}: {dict(soak.done)}")
    print(
        f"supervisor: {last.resident / 1024:.1f} MiB, {growth:+.1%} since the warm-up;"
        f" {last.descriptors} descriptors; at most"
        f" {max(s.processes for s in soak.samples)} session processes at a time"
    )
    for fault in soak.faults:
        print(f"FAULT: {fault}")
    good = growth <= MOST_GROWTH and not soak.faults
    print("nothing is left, and the memory is flat" if good else "NOT as it should be")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
