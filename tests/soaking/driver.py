"""A worker under random heads for a long time: what it needs must not grow.

Several heads at a time, in processes of their own and in this one, in sessions that end in every
way there is: in order, killed, cut off; with first bytes that mean nothing; with session processes
that die by signal. Sampled is the supervisor, which is what stays.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import caravan
from caravan.errors import CaravanError
from caravan.llm import Context, Model, ModelParams
from caravan.wire import codec, extension
from caravan.wire.commands import Base, Ext
from caravan.wire.extension import NO_DEVICE, PeerRequest
from e2e import tiny
from e2e.cable import Cable
from e2e.loads import is_spare
from e2e.processes import children, descriptors, kill, wait_for
from soaking import head
from worker.raw_client import BaseClient, Closed, ExtClient, Wire

DEVICE = 96 << 20
OPTIONS = ("--max-memory", str(DEVICE), "--timeout", "2", "--idle-timeout", "20")
SIGNALS = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS)
# Room for noise in a memory of some 20 MB; a leak of a kilobyte a session shows within an hour.
MOST_GROWTH = 0.05
# The worker's limit, and some that are just starting or ending.
MOST_PROCESSES = 24


@dataclass(frozen=True)
class Sample:
    """Of the supervisor: seconds since the start, resident KiB, descriptors, its processes."""

    seconds: float
    resident: int
    descriptors: int
    processes: int


def resident(pid: int) -> int:
    """KiB of memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1])
    return 0


def state(pid: int) -> str:
    """The letter that /proc has for it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return "?"


class Soak:
    """See the module.

    Args:
        folder: for the model.
        heads: how many at a time.
        pause: seconds that each rests between two sessions, on average.

    Attributes:
        done: what was done, and how often.
        samples: one a second.
        faults: what must not have happened.
    """

    def __init__(self, folder: Path, seed: int, heads: int = 4, pause: float = 1.0) -> None:
        self.done: Counter[str] = Counter()
        self.samples: list[Sample] = []
        self.faults: list[str] = []
        self._path = str(tiny.write(folder / "tiny.gguf"))
        self._rng = random.Random(seed)
        self._pause = pause
        self._stop = threading.Event()
        self.worker = caravan.Worker("CPU:1", options=OPTIONS)
        self._threads = [
            threading.Thread(target=self._play, args=(random.Random(seed * 1000 + number),))
            for number in range(heads)
        ]

    def run(self, seconds: float, told: Callable[[str], None] = lambda line: None) -> None:
        """Go on for so long, and then wait until all is quiet."""
        wait_for(lambda: len(children(self.worker.pid)) == 1)
        before = descriptors(self.worker.pid)
        started = time.monotonic()
        for thread in self._threads:
            thread.start()
        try:
            while (passed := time.monotonic() - started) < seconds and not self.faults:
                self._sample(passed)
                if len(self.samples) % 60 == 0:
                    told(f"{self.samples[-1]} {dict(self.done)}")
                time.sleep(1.0)
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join()
        self._check_quiet(before)
        self._sample(time.monotonic() - started)

    def close(self) -> None:
        self.worker.close()

    def _sample(self, seconds: float) -> None:
        pid = self.worker.pid
        family = children(pid)
        self.samples.append(Sample(seconds, resident(pid), descriptors(pid), len(family)))
        if len(family) > MOST_PROCESSES:
            states = "".join(map(state, family))
            said = self.worker.messages()
            self.faults.append(f"{len(family)} session processes ({states}); it said last: {said}")

    def _check_quiet(self, before: int) -> None:
        """Nothing is left of any session: no process, no descriptor, no memory of the device."""
        pid = self.worker.pid

        def quiet() -> bool:
            return [*map(is_spare, children(pid))] == [True] and descriptors(pid) == before

        try:
            wait_for(quiet, 40.0)
        except AssertionError:
            self.faults.append(
                f"left are session processes {children(pid)} and {descriptors(pid)} descriptors,"
                f" of which there were {before} at first"
            )
        with ExtClient(self.worker.endpoint) as client:
            if client.call(Ext.MEMORY) != (DEVICE, DEVICE):
                self.faults.append(f"memory is left: {client.call(Ext.MEMORY)}")

    def growth(self, warm_up: float) -> float:
        """By which part the supervisor's memory grew from the first quarter after the warm-up to
        the last one; medians, since greeting many at once takes memory for a moment."""
        sizes = [s.resident for s in self.samples if s.seconds >= warm_up]
        quarter = max(1, len(sizes) // 4)
        first, last = statistics.median(sizes[:quarter]), statistics.median(sizes[-quarter:])
        return last / first - 1

    # what heads do

    def _play(self, rng: random.Random) -> None:
        plays = {self._here: 4, self._process: 2, self._cut: 2, self._rude: 6, self._death: 2}
        with (
            Model(self._path, ModelParams(repack=False)) as model,
            Context(model, head.PARAMS) as reference,
        ):
            while not self._stop.wait(rng.expovariate(1 / self._pause)):
                (play,) = rng.choices([*plays], [*plays.values()])
                try:
                    play(rng, reference)
                    self.done[play.__name__[1:]] += 1
                except (CaravanError, Closed, OSError):
                    # another one's fault, such as a session process that was killed
                    self.done["lost"] += 1
                except Exception as exc:
                    self.faults.append(f"{play.__name__}: {exc!r}")
                    return

    def _here(self, rng: random.Random, reference: Context) -> None:
        """A session of this process, to its end."""
        head.session(self.worker.endpoint, self._path, rng, reference)

    def _process(self, rng: random.Random, reference: Context) -> None:
        """A head that is killed."""
        arguments = [head.__file__, self._path, str(rng.randrange(1 << 30)), self.worker.endpoint]
        process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
        try:
            self._stop.wait(rng.uniform(0.5, 4.0))
            wrong = process.poll()
        finally:
            process.kill()
            text, _ = process.communicate()
        self.done["sessions of processes"] += text.count("session")
        if wrong is not None:
            self.faults.append(f"a head ended with {wrong}: {text}")

    def _cut(self, rng: random.Random, reference: Context) -> None:
        """A session whose connection is cut, or pulled and then closed, at some moment."""
        with Cable(self.worker.endpoint) as cable:
            act = rng.choice((cable.cut, cable.close))
            timer = threading.Timer(rng.expovariate(4), act)
            timer.start()
            try:
                head.session(cable.endpoint, self._path, rng, reference)
            finally:
                timer.cancel()
                timer.join()

    def _death(self, rng: random.Random, reference: Context) -> None:
        """Some session process, whosever it is, dies."""
        found = [pid for pid in children(self.worker.pid) if not is_spare(pid)]
        if found:
            kill(rng.choice(found), rng.choice(SIGNALS))

    def _rude(self, rng: random.Random, reference: Context) -> None:
        """First bytes that mean nothing, or not enough, or something that nobody knows of."""
        act = rng.choice((self._noise, self._half, self._silent, self._asks, self._stranger))
        act(rng)

    def _noise(self, rng: random.Random) -> None:
        with Wire(self.worker.endpoint) as wire:
            wire.send(rng.randbytes(rng.randrange(1, 2000)))
            self._hear(wire)

    def _half(self, rng: random.Random) -> None:
        whole = codec.hello_request(extension.caps()) + codec.ext_frame(Ext.SESSION, 1, 100)
        with Wire(self.worker.endpoint) as wire:
            wire.send(whole[: rng.randrange(len(whole))])
            if rng.random() < 0.5:
                wire.sock.shutdown(socket.SHUT_WR)
                self._hear(wire)

    def _silent(self, rng: random.Random) -> None:
        with Wire(self.worker.endpoint):
            self._stop.wait(rng.uniform(0.0, 3.0))

    def _asks(self, rng: random.Random) -> None:
        with BaseClient(self.worker.endpoint) as client:
            client.call(Base.DEVICE_COUNT)

    def _stranger(self, rng: random.Random) -> None:
        if rng.random() < 0.5:
            with ExtClient(self.worker.endpoint, NO_DEVICE, f"{rng.getrandbits(128):032x}"):
                return
        with Wire(self.worker.endpoint) as wire:
            wire.hello(extension.caps())
            data = extension.encode_json(PeerRequest(1, f"{rng.getrandbits(128):032x}", 0))
            wire.send(codec.ext_frame(Ext.PEER, 1, len(data)), data)
            self._hear(wire)

    @staticmethod
    def _hear(wire: Wire) -> None:
        """Read to the end, a while at most."""
        wire.sock.settimeout(4.0)
        with contextlib.suppress(OSError):
            while wire.sock.recv(4096):
                pass
