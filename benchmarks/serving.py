"""`caravan serve` over two workers of one machine, as its clients see it.

    python benchmarks/serving.py {one,eight,first,many} [--rounds 5] [--seed 1]

- `one`: time per token of one stream, beside `caravan run` on the same workers; they take turns.
- `eight`: tokens a second of eight streams together, beside one stream on the same server.
- `first`: time to the first token of a short request that comes after a prompt of 4,096 tokens, in
  micro-batches of that prompt.
- `many`: 500 requests of random lengths, 32 at a time, 5 % of which hang up; the others must get
  the answers that they get alone.

Further options are those of `caravan serve`. Needs `httpx` (the extra `test`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import httpx

import caravan
from measure import machine, spread

_RATE = re.compile(r"^decode: \d+ tokens, ([0-9.]+) t/s", re.M)
_READY = re.compile(r"http://\S+")
TALE = "the caravan left an oasis before dawn, and nobody looked back at all"


@dataclass
class Answer:
    """What came of a request: the times of its parts (perf_counter), and its usage."""

    begun: float
    times: list[float]
    text: str
    usage: dict

    @property
    def first(self) -> float:
        """Seconds to the first token."""
        return self.times[0] - self.begun

    @property
    def per_token(self) -> float:
        """Seconds of each token after the first."""
        return (self.times[-1] - self.times[0]) / (self.usage["completion_tokens"] - 1)


@contextmanager
def serving(options: list[str]) -> Iterator[str]:
    """The URL of a server with these options."""
    command = [sys.executable, "-m", "caravan", "serve", "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if found := _READY.search(line):
                    yield found.group().rstrip("/")
                    break
            else:
                raise SystemExit("the server did not start")
        finally:
            server.terminate()
            server.communicate()


async def events(client: httpx.AsyncClient, body: dict) -> AsyncIterator[tuple[float, dict]]:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body, timeout=600) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield time.perf_counter(), json.loads(line[6:])


async def complete(client: httpx.AsyncClient, prompt: str | list[int], n: int, **more) -> Answer:
    body = {"model": "m", "prompt": prompt, "max_tokens": n, "temperature": 0, **more}
    answer = Answer(time.perf_counter(), [], "", {})
    async for moment, event in events(client, body):
        if event.get("usage"):
            answer.usage = event["usage"]
        for choice in event["choices"]:
            if choice["text"]:
                answer.times.append(moment)
                answer.text += choice["text"]
    return answer


def text(dice: random.Random, words: int) -> str:
    return " ".join(dice.choice(TALE.split()) for _ in range(words))


def one(args: argparse.Namespace, workers: list[str]) -> None:
    prompt = "Once upon a time, there was a"
    server: list[float] = []
    run: list[float] = []

    def by_run() -> None:
        command = [
            sys.executable,
            "-m",
            "caravan",
            "run",
            "-m",
            args.model,
            "-p",
            prompt,
            "-n",
            "200",
        ]
        done = subprocess.run(
            [*command, "--temp", "0", "--rpc", ",".join(workers)],
            capture_output=True,
            text=True,
            check=True,
        )
        run.append(1 / float(_RATE.search(done.stderr).group(1)))

    async def by_server(url: str) -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            server.append((await complete(client, prompt, 200)).per_token)

    with serving(["-m", args.model, "--rpc", ",".join(workers)]) as url:
        asyncio.run(by_server(url))
        server.clear()
        for _ in range(args.rounds):
            by_run()
            asyncio.run(by_server(url))
    ratios = [s / r for s, r in zip(server, run, strict=True)]
    print(
        f"ms a token: server {spread([1e3 * s for s in server])},"
        f" run {spread([1e3 * r for r in run])}"
    )
    print(f"server / run: {median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f}); goal 1.03")


def eight(args: argparse.Namespace, workers: list[str]) -> None:
    n, count = 96, 8
    rates: dict[int, list[float]] = {1: [], count: []}

    async def streams(url: str, k: int, salt: int) -> float:
        async with httpx.AsyncClient(base_url=url) as client:
            prompts = [f"Here is story number {salt + i}. Once upon a time" for i in range(k)]
            began = time.perf_counter()
            found = await asyncio.gather(
                *(complete(client, p, n, ignore_eos=True) for p in prompts)
            )
            tokens = sum(answer.usage["completion_tokens"] for answer in found)
            return tokens / (time.perf_counter() - began)

    options = ["-m", args.model, "--rpc", ",".join(workers), "--slots", str(count)]
    with serving([*options, *args.serve]) as url:
        asyncio.run(streams(url, count, 0))
        for number in range(args.rounds):
            for k in rates:
                rates[k].append(asyncio.run(streams(url, k, 10 * number)))
    ratios = [e / o for o, e in zip(*rates.values(), strict=True)]
    for k, found in rates.items():
        print(f"{k} streams: {spread(found)} t/s")
    print(f"ratio: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}); goal 2.5")


def first(args: argparse.Namespace, workers: list[str]) -> None:
    n_long, ubatch = 4096, 64
    found: list[float] = []
    alone: list[float] = []

    async def both(url: str, dice: random.Random) -> None:
        long = [dice.randrange(1000, 40000) for _ in range(n_long)]
        async with httpx.AsyncClient(base_url=url) as client:
            quiet = await complete(client, long[:1024], 1)
            long_request = asyncio.create_task(complete(client, long[::-1], 4))
            await asyncio.sleep(1.0)
            short = await complete(client, text(dice, 20), 8)
            await long_request
        micro = quiet.first / (1024 / ubatch)
        alone.append(micro * 1e3)
        found.append(short.first / micro)

    options = ["-m", args.model, "--rpc", ",".join(workers), "-ub", str(ubatch), "-c", "4352"]
    with serving([*options, *args.serve]) as url:
        for number in range(args.rounds + 1):
            asyncio.run(both(url, random.Random(args.seed + number)))
    print(f"a micro-batch of {ubatch} tokens: {spread(alone[1:])} ms")
    print(
        f"first token of a short request after a prompt of {n_long}: {spread(found[1:])}"
        " micro-batches; goal 4"
    )


def many(args: argparse.Namespace, workers: list[str]) -> None:
    dice = random.Random(args.seed)
    requests = [
        (text(dice, dice.randint(1, 60)), dice.randint(1, 24)) for _ in range(args.requests)
    ]
    hanging = set(dice.sample(range(len(requests)), len(requests) // 20))
    errors: list[str] = []

    async def single(url: str) -> list[str]:
        async with httpx.AsyncClient(base_url=url) as client:
            return [(await complete(client, *request)).text for request in requests]

    async def hang_up(client: httpx.AsyncClient, request: tuple[str, int]) -> None:
        body = {"model": "m", "prompt": request[0], "max_tokens": 500, "temperature": 0}
        after = dice.randint(0, 3)
        async for _ in events(client, body):
            after -= 1
            if after < 0:
                return

    async def together(url: str) -> list[str]:
        gate = asyncio.Semaphore(32)
        texts = [""] * len(requests)

        async def ask(client: httpx.AsyncClient, index: int) -> None:
            async with gate:
                try:
                    if index in hanging:
                        await hang_up(client, requests[index])
                    else:
                        texts[index] = (await complete(client, *requests[index])).text
                except (httpx.HTTPError, ValueError) as exc:
                    errors.append(f"{index}: {exc!r}")

        async with httpx.AsyncClient(base_url=url) as client:
            await asyncio.gather(*(ask(client, index) for index in range(len(requests))))
        return texts

    options = ["-m", args.model, "--rpc", ",".join(workers), "--slots", "8"]
    with serving([*options, *args.serve]) as url:
        alone = asyncio.run(single(url))
        before = memory(url)
        began = time.perf_counter()
        found = asyncio.run(together(url))
        seconds = time.perf_counter() - began
        deadline = time.perf_counter() + 10
        while any(s["is_processing"] for s in httpx.get(f"{url}/slots").json()):
            assert time.perf_counter() < deadline, "a slot is still busy"
        after = memory(url)
    different = [i for i in range(len(requests)) if i not in hanging and found[i] != alone[i]]
    print(
        f"{len(requests)} requests in {seconds:.0f} s, {len(hanging)} hung up, {len(errors)} errors"
    )
    print(f"{len(different)} answers differ from the one alone; server: {before} -> {after}")
    for index in different[:5]:
        same = len(common(alone[index], found[index]))
        print(
            f"  {index}: after {same} characters: {alone[index][same:][:30]!r}"
            f" / {found[index][same:][:30]!r}"
        )
    for error in errors[:5]:
        print(" ", error)


def common(one: str, other: str) -> str:
    for n, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return one[:n]
    return one[: min(len(one), len(other))]


def memory(url: str) -> str:
    """Of the process that listens there."""
    port = int(url.rpartition(":")[2])
    for status in Path("/proc").glob("[0-9]*/cmdline"):
        words = status.read_bytes().split(b"\0")
        if b"serve" in words and listens(status.parent, port):
            rss = re.search(r"VmRSS:\s+(\d+)", (status.parent / "status").read_text())
            fds = len(list((status.parent / "fd").iterdir()))
            return f"{int(rss.group(1)) / 1024:.0f} MiB, {fds} descriptors"
    return "?"


def listens(process: Path, port: int) -> bool:
    inodes = set()
    for line in (process / "net" / "tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[1].rpartition(":")[2], 16) == port and fields[3] == "0A":
            inodes.add(fields[9])
    links = []
    for link in (process / "fd").iterdir():
        try:
            links.append(str(link.readlink()))
        except OSError:
            continue
    return any(f"socket:[{inode}]" in links for inode in inodes)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("one", "eight", "first", "many"))
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    args, args.serve = parser.parse_known_args()
    print(machine(), file=sys.stderr)
    with caravan.LocalWorkers(2, threads=1) as workers:
        {"one": one, "eight": eight, "first": first, "many": many}[args.what](
            args, workers.endpoints
        )


if __name__ == "__main__":
    main()
