"""Random kills during `caravan run --resume`: the text must be the undisturbed one each time.

    python benchmarks/kills.py [-n 25] [--seed 1] [--log FILE]

Two workers with one CPU device each, on loopback, with the weights in their caches. Each trial is
one `caravan run` of the sample model (greedy), during which, at random moments after it has
connected, the session process or the whole worker of either is killed with SIGKILL, once or twice.
A whole worker is started again on its port, at once or up to two seconds later. What counts is a
kill that struck before the run was over.

With `--log`, trials are appended to the file, and the summary is about all that it has: a long
series may be run in pieces, each with a seed of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from caravan.worker.local import Worker
from e2e.processes import children, command, descriptors, kill, wait_for

PROMPT = "The caravan left the oasis before dawn, and nobody looked back. " * 8
N_GEN = 24
# a run that takes so long hangs
BOUND = 120.0
_BACK = re.compile(r"was lost during (\w+) .*after ([0-9.]+) s(?:, (\d+) tokens? replayed)?$")


@dataclass
class Trial:
    """One run.

    Attributes:
        kills: what was killed, such as `session 0 at 1.20 s`, in order.
        same: whether the text was the right one, and the exit code 0.
        resumes: (command, seconds, tokens replayed) of each loss that the run told of.
        error: the last line, if it went wrong.
    """

    kills: list[str]
    same: bool
    resumes: list[tuple[str, float, int]]
    error: str = ""


class Victims:
    """Two workers that may be killed. Close it."""

    def __init__(self, directory: Path) -> None:
        self._caches = [directory / f"cache{n}" for n in range(2)]
        self._workers = [self._start(n, 0) for n in range(2)]
        self.endpoints = [worker.endpoint for worker in self._workers]
        self._starting: list[threading.Thread] = []

    def _start(self, number: int, port: int) -> Worker:
        options = ("--cache", str(self._caches[number]))
        return Worker("CPU:1", port=port, options=options)

    def kill_session(self, number: int) -> None:
        """Of the head's session; the spare has no connections."""
        sessions = children(self._workers[number].pid)
        if sessions:
            kill(max(sessions, key=_connections))

    def kill_worker(self, number: int, delay: float) -> bool:
        """And start it again; False if it has not been started again since the last time."""
        worker = self._workers[number]
        if not worker.pid:
            return False
        port = int(self.endpoints[number].rpartition(":")[2])
        kill(worker.pid)

        def start() -> None:
            time.sleep(delay)
            worker.close()
            self._workers[number] = self._start(number, port)

        thread = threading.Thread(target=start)
        thread.start()
        self._starting.append(thread)
        return True

    def settle(self) -> None:
        """Until both are there, with nothing but a spare."""
        for thread in self._starting:
            thread.join()
        self._starting = []
        for worker in self._workers:
            wait_for(lambda worker=worker: len(children(worker.pid)) == 1)

    def close(self) -> None:
        for thread in self._starting:
            thread.join()
        for worker in self._workers:
            worker.close()


def _connections(pid: int) -> int:
    try:
        return descriptors(pid)
    except OSError:
        return -1


@contextmanager
def victims() -> Iterator[Victims]:
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="caravan-kills-"))
        workers = Victims(Path(directory))
        stack.callback(workers.close)
        yield workers


class Run:
    """A `caravan run` that can be watched."""

    def __init__(self, model: str, endpoints: list[str]) -> None:
        words = ("run", "-m", model, "-p", PROMPT, "-n", str(N_GEN), "--temp", "0", "-ub", "32")
        self.process = subprocess.Popen(
            command(*words, "--rpc", ",".join(endpoints), "--resume"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.connected = threading.Event()
        self.lines: list[str] = []
        self.text = ""
        self._readers = [
            threading.Thread(target=self._read_errors),
            threading.Thread(target=self._read_text),
        ]
        for reader in self._readers:
            reader.start()

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                self.lines.append(line.rstrip())
                # what it needs is told when it knows the workers, before anything is sent
                if " needs " in line:
                    self.connected.set()
        self.connected.set()

    def _read_text(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as stdout:
            self.text = stdout.read()

    def finish(self) -> int:
        try:
            code = self.process.wait(BOUND)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
            self.lines.append(f"it has not ended after {BOUND:g} s")
        for reader in self._readers:
            reader.join()
        return code


def undisturbed(model: str, workers: Victims) -> tuple[str, float]:
    """Its text, and the seconds from when it has connected. The caches are full afterwards."""
    for _ in range(2):
        run = Run(model, workers.endpoints)
        assert run.connected.wait(BOUND)
        began = time.monotonic()
        code = run.finish()
        seconds = time.monotonic() - began
        assert code == 0, run.lines
        workers.settle()
    return run.text, seconds


def trial(
    model: str, workers: Victims, expected: str, seconds: float, chance: random.Random
) -> Trial:
    """One run with one or two kills, at moments of an undisturbed run."""
    moments = sorted(chance.uniform(0, seconds) for _ in range(chance.choice((1, 1, 1, 2))))
    run = Run(model, workers.endpoints)
    run.connected.wait(BOUND)
    began = time.monotonic()
    kills: list[str] = []
    for moment in moments:
        try:
            run.process.wait(max(0.0, began + moment - time.monotonic()))
            break
        except subprocess.TimeoutExpired:
            number = chance.randrange(2)
            if chance.random() < 0.5:
                workers.kill_session(number)
                kills.append(f"session {number} at {moment:.2f} s")
            else:
                delay = chance.choice((0.0, chance.uniform(0, 2)))
                if workers.kill_worker(number, delay):
                    kills.append(f"worker {number} at {moment:.2f} s, for {delay:.2f} s")
    code = run.finish()
    same = code == 0 and run.text == expected
    workers.settle()
    told = [match for line in run.lines if (match := _BACK.search(line))]
    resumes = [(match[1], float(match[2]), int(match[3] or 0)) for match in told]
    return Trial(kills, same, resumes, "" if same else "; ".join(run.lines[-3:]))


def summary(trials: list[Trial], n_prompt: int) -> list[str]:
    """What came of all kills, in lines."""
    kinds = Counter(what.split()[0] for one in trials for what in one.kills)
    resumes = [resume for one in trials for resume in one.resumes]
    phases = Counter(
        "loading" if not tokens else "prompt" if tokens <= n_prompt else "decode"
        for _, _, tokens in resumes
    )
    wrong = [one for one in trials if not one.same]
    lines = [
        f"{sum(kinds.values())} kills in {len(trials)} runs"
        f" ({', '.join(f'{count} of a {kind}' for kind, count in sorted(kinds.items()))}):"
        f" {len(wrong)} with another text",
        f"told of {len(resumes)} losses"
        f" ({', '.join(f'{count} in {phase}' for phase, count in sorted(phases.items()))})",
    ]
    if resumes:
        seconds = sorted(seconds for _, seconds, _ in resumes)
        lines.append(f"back after {median(seconds):.1f} s (median), {seconds[-1]:.1f} s at most")
    return lines + [f"{one.kills}: {one.error}" for one in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", type=int, default=25, help="kills that struck")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after that")
    parser.add_argument("--log", type=Path)
    options = parser.parse_args()
    from caravan.llm import Model, ModelParams
    from caravan.models import resolve

    path = resolve("smollm2")
    with Model(path, ModelParams(vocab_only=True)) as words:
        n_prompt = len(words.tokenize(PROMPT))
    chance = random.Random(options.seed)
    trials: list[Trial] = []
    began = time.monotonic()
    with victims() as workers:
        expected, seconds = undisturbed(str(path), workers)
        while sum(len(one.kills) for one in trials) < options.n:
            if time.monotonic() - began > options.seconds:
                break
            one = trial(str(path), workers, expected, seconds, chance)
            if one.kills:
                trials.append(one)
                print("ok " if one.same else "BAD", one.kills, one.resumes, one.error, flush=True)
    if options.log:
        with options.log.open("a") as log:
            log.writelines(json.dumps(asdict(one)) + "\n" for one in trials)
        trials = [Trial(**json.loads(line)) for line in options.log.read_text().splitlines()]
    print(*summary(trials, n_prompt), sep="\n")
    sys.exit(any(not one.same for one in trials))


if __name__ == "__main__":
    main()
