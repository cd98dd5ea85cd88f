"""Every failure of a command is one line on stderr and exit code 1; Ctrl-C leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from caravan.wire import codec
from caravan.wire.versions import Version
from e2e.processes import (
    BOUND,
    alive,
    assert_one_line,
    caravan,
    closed_port,
    command,
    kill,
    peer,
    running,
    wait_for,
)

LONG = "The caravan left the oasis before dawn, and nobody looked back. " * 100
HTTP = b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n"
COMMANDS = {
    "run": ("run", "-p", "Hello", "-n", "8", "-ub", "32", "--temp", "0", "-q"),
    "bench": ("bench", "-p", "32", "-n", "0", "-ub", "32", "-r", "1"),
}


@pytest.fixture(params=COMMANDS)
def words(request, smollm2):
    return (*COMMANDS[request.param], "-m", str(smollm2))


# nobody there, or somebody else


def test_unknown_host(words):
    assert_one_line(caravan(*words, "--rpc", "nosuch.invalid:1"), "unknown host", "nosuch.invalid")


def test_refused_port(words):
    endpoint = closed_port()
    assert_one_line(caravan(*words, "--rpc", endpoint), endpoint, "refused")


def test_a_port_that_never_answers(words):
    with peer(None) as endpoint:
        done = caravan(*words, "--rpc", endpoint, "--timeout", "0.5")
    assert_one_line(done, endpoint, "did not answer within 0.5 s")


def test_another_protocol(words):
    with peer(HTTP) as endpoint:
        assert_one_line(caravan(*words, "--rpc", endpoint), endpoint, "no RPC worker")


def test_a_peer_that_hangs_up(words):
    with peer(b"") as endpoint:
        assert_one_line(caravan(*words, "--rpc", endpoint), endpoint, "closed the connection")


@pytest.mark.parametrize("version", [Version(5, 1, 0), Version(9, 0, 0)])
def test_another_version(version, words):
    with peer(codec.hello_reply(version, bytes(20))) as endpoint:
        assert_one_line(caravan(*words, "--rpc", endpoint), endpoint, str(version))


# models


def test_no_such_model(tmp_path):
    path = str(tmp_path / "none.gguf")
    assert_one_line(caravan("run", "-m", path, "-p", "x"), path)
    assert_one_line(caravan("bench", "-m", path), path)


def test_not_a_model(tmp_path):
    path = tmp_path / "letter.gguf"
    path.write_text("Dear caravan")
    assert_one_line(caravan("run", "-m", str(path), "-p", "x"), "not a GGUF file")
    assert_one_line(caravan("bench", "-m", str(path)), "not a GGUF file")


@pytest.mark.parametrize("size", [4, 100, 1_000_000, 50_000_000])
def test_a_truncated_model(size, smollm2, tmp_path):
    path = tmp_path / "half.gguf"
    with smollm2.open("rb") as file:
        path.write_bytes(file.read(size))
    options = ("--local-workers", "1") if size > 1_000_000 else ()
    assert_one_line(caravan("run", "-m", str(path), "-p", "x", *options), str(path))


# allocations


def test_a_refused_allocation_names_the_device(smollm2):
    done = caravan(*COMMANDS["run"], "-m", str(smollm2), "-c", "8000000", "--local-workers", "2")
    assert_one_line(done, "does not fit", " at 127.0.0.1:", " lacks ", "KV cache")
    done = caravan(
        *(*COMMANDS["run"], "-m", str(smollm2), "-c", "8000000", "--local-workers", "2"),
        *("--fit", "off"),
    )
    assert_one_line(done, "no context of 8000000 tokens", " at 127.0.0.1:", "no room")


def test_a_context_beyond_this_machine_is_refused_before_it_is_tried(smollm2):
    done = caravan(*COMMANDS["run"], "-m", str(smollm2), "-c", "2000000000")
    assert_one_line(done, "no context of 2000000000 tokens")


# output


def test_a_broken_pipe_is_quiet(words):
    run = " ".join(command(*words, "--local-workers", "1"))
    shell = f"{run} | head -c 5 > /dev/null; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=BOUND)
    assert (done.stdout.strip(), done.stderr) in {("1", ""), ("0", "")}


def test_a_full_disk(words):
    with open("/dev/full", "w") as full:
        done = caravan(*words, "--local-workers", "1", stdout=full)
    assert_one_line(done, "No space left")


def test_an_output_that_fails_in_another_way(words, tmp_path):
    """What is left in a buffer must not fail a second time when the interpreter ends."""
    place = tmp_path / "out"
    place.write_bytes(b"")
    with place.open() as read_only:
        done = caravan(*words, stdout=read_only)
    assert_one_line(done, "Bad file descriptor")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_streams(closed, smollm2):
    """Its sockets and the engine's files must not take the place of one of them."""
    run = " ".join(command(*COMMANDS["run"], "-m", str(smollm2), "--local-workers", "1"))
    done = subprocess.run(
        ["bash", "-c", f"{run} {closed}"], capture_output=True, text=True, timeout=BOUND
    )
    assert done.returncode == 0, done.stderr
    assert bool(done.stdout) == (closed in ("<&-", "2>&-"))


def test_an_error_does_not_go_to_stdout_without_a_stderr():
    run = " ".join(command("run", "-m", "/nowhere.gguf", "-p", "x"))
    done = subprocess.run(["bash", "-c", f"{run} 2>&-"], capture_output=True, timeout=BOUND)
    assert (done.returncode, done.stdout) == (1, b"")


# workers that go away under a command


def test_a_worker_that_is_killed_in_a_long_prompt(smollm2):
    with running(
        *("bench", "-m", str(smollm2), "-p", "4096", "-n", "0", "-ub", "64", "-r", "1"),
        *("--no-warmup", "--progress", "--local-workers=2", "--split=memory"),
    ) as bench:
        wait_for(lambda: bench.says("prompt run 1/1"))
        bench.meet_family()
        workers = [pid for pid in bench.family if os.getppid() != pid and _is_worker(pid)]
        assert len(workers) == 2
        kill(workers[1])
        assert bench.finish() == 1
        assert len(errors := [line for line in bench.lines if "error" in line]) == 1
        assert "lost RPC" in errors[0]


def _is_worker(pid: int) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return b"worker" in words


# Ctrl-C

LOADING = ("bench", "-p", "64", "-n", "0", "-r", "1", "--progress")
PROMPT = ("bench", "-p", "4096", "-n", "0", "-ub", "64", "-r", "1", "--no-warmup", "--progress")
DECODE = ("bench", "-p", "0", "-n", "2000", "-r", "1", "--no-warmup", "--progress")


@pytest.mark.parametrize(
    ("words", "phase", "presses"),
    [
        (LOADING, ": starting", 1),
        (PROMPT, "prompt run 1/1", 1),
        (PROMPT, "prompt run 1/1", 2),
        (DECODE, "generation run 1/1", 1),
    ],
    ids=["load", "prompt", "prompt, twice", "decode"],
)
def test_ctrl_c_ends_a_bench_and_its_workers(words, phase, presses, smollm2):
    with running(*words, "-m", str(smollm2), "--local-workers=2", "--split=memory") as bench:
        wait_for(lambda: bench.says(phase))
        time.sleep(0.05 if words is LOADING else 0.4)
        for _ in range(presses):
            bench.interrupt()
            time.sleep(0.02)
        assert bench.finish() == 130
        assert not bench.says("Traceback")
        assert not bench.says("rror")
        assert len(bench.family) >= 4  # two workers and a session each


def test_ctrl_c_ends_a_run_in_its_prompt(smollm2):
    options = ("-m", str(smollm2), "-ub", "64", "-n", "4", "-q")
    options += ("--local-workers=2", "--split=memory")
    with running("run", "-p", LONG, *options) as run:
        wait_for(lambda: len(run.meet_family()) >= 4)
        wait_for(lambda: sum(map(_seconds, run.meet_family())) > 3.0)
        run.interrupt()
        assert run.finish() == 130
        assert run.text == ""
        assert [line for line in run.lines if line] in ([], ["caravan: interrupted"])


@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_ends_a_run_while_it_writes(presses, smollm2):
    options = ("-m", str(smollm2), "-n", "2000", "--temp", "0", "-q")
    options += ("--local-workers=2", "--split=memory")
    with running("run", "-p", "One, two, three,", *options) as run:
        wait_for(lambda: len(run.text) > 5)
        for _ in range(presses):
            run.interrupt()
        assert run.finish() == 130
        assert [line for line in run.lines if line] in ([], ["caravan: interrupted"])


def test_ctrl_c_while_connecting(smollm2):
    with (
        peer(None) as endpoint,
        running("run", "-m", str(smollm2), "-p", "x", "--rpc", endpoint, "--timeout", "20") as run,
    ):
        time.sleep(1.0)
        started = time.monotonic()
        run.interrupt()
        assert run.finish() == 130
        assert time.monotonic() - started < 10
        assert [line for line in run.lines if line] == ["caravan: interrupted"]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_workers_end_with_a_command_that_is_killed(number, smollm2):
    options = ("-m", str(smollm2), "-n", "2000", "--temp", "0", "-q")
    options += ("--local-workers=2", "--split=memory")
    with running("run", "-p", "One, two, three,", *options) as run:
        wait_for(lambda: len(run.text) > 5)
        run.meet_family()
        assert any(map(alive, run.family))
        kill(run.process.pid, number)
        assert run.finish() == -number


def _seconds(pid: int) -> float:
    """Processor time of a process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# the worker's own command


def test_a_worker_on_a_taken_port():
    with peer(None) as endpoint:
        done = caravan("worker", "--no-cache", "-p", endpoint.rpartition(":")[2])
    assert_one_line(done, "in use")


def test_a_worker_with_an_unknown_device():
    assert_one_line(caravan("worker", "--no-cache", "-p", "0", "-d", "CUDA7"), "CUDA7")


def test_a_worker_on_an_unknown_host_is_not_warned_of_it():
    assert_one_line(
        caravan("worker", "--no-cache", "-p", "0", "-H", "nosuch.invalid"), "unknown host"
    )


def test_a_worker_without_room_for_its_words():
    with open("/dev/full", "w") as full:
        done = caravan("worker", "--no-cache", "-p", "0", stdout=full)
    assert_one_line(done, "No space left")
