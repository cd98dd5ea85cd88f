"""The unhappy paths, with real workers and the sample model: named errors, nothing left over."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import caravan
from caravan.errors import (
    ConnectError,
    ContextError,
    RemoteProtocolError,
    TransportError,
    TransportTimeout,
    VersionMismatch,
    WorkerLost,
)
from caravan.llm import Context, ContextParams, Model, SamplingParams
from caravan.wire import codec
from caravan.wire.versions import Version
from e2e.processes import (
    BOUND,
    children,
    closed_port,
    command,
    descriptors,
    kill,
    peer,
    session_of,
    wait_for,
)
from relaying import Relay
from wired import Side

PARAMS = ContextParams(n_ctx=512, n_ubatch=32)
N_PROMPT = 400


def supervisor_of(worker: caravan.Worker) -> int:
    return worker.pid


VICTIMS = {"session": session_of, "supervisor": supervisor_of}


@pytest.fixture(params=VICTIMS)
def victim(request) -> Callable[[caravan.Worker], int]:
    return VICTIMS[request.param]


@pytest.fixture
def pair() -> Iterator[list[caravan.Worker]]:
    with caravan.LocalWorkers(2) as workers:
        yield workers.workers


def endpoints(workers: list[caravan.Worker]) -> list[str]:
    return [worker.endpoint for worker in workers]


def check(context: Context, tokens: list[int], expected: np.ndarray) -> None:
    context.clear()
    context.decode(tokens[:40])
    assert np.array_equal(context.logits(), expected)


def serves(worker_endpoints: list[str], smollm2: Path, tokens, expected) -> None:
    with (
        caravan.connect(worker_endpoints) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        check(context, tokens, expected)


# connecting


def test_unknown_host():
    with pytest.raises(ConnectError, match="unknown host"):
        caravan.connect(["nosuch.invalid:1"])


def test_refused():
    with pytest.raises(ConnectError, match="refused"):
        caravan.connect([closed_port()])


def test_silence():
    with peer(None) as endpoint, pytest.raises(ConnectError, match="did not answer"):
        caravan.connect([endpoint], timeout=0.3)


def test_another_protocol():
    with (
        peer(b"HTTP/1.1 400 Bad Request\r\n\r\n") as endpoint,
        pytest.raises(RemoteProtocolError, match="no RPC worker"),
    ):
        caravan.connect([endpoint])


def test_another_version():
    with (
        peer(codec.hello_reply(Version(9, 0, 0), bytes(20))) as endpoint,
        pytest.raises(VersionMismatch, match=r"9\.0\.0"),
    ):
        caravan.connect([endpoint])


def test_a_session_that_never_opens(pair):
    """The worker answers HELLO, and then stands still."""
    wait_for(lambda: children(pair[0].pid))
    kill(children(pair[0].pid)[0], signal.SIGSTOP)
    with pytest.raises(ConnectError, match="did not open a session in time"):
        caravan.connect([pair[0].endpoint], timeout=1.0)


def test_one_bad_endpoint_lets_go_of_the_good_ones(pair, smollm2, tokens, expected):
    for _ in range(3):
        with pytest.raises(ConnectError):
            caravan.connect([pair[0].endpoint, closed_port(), pair[1].endpoint])
    serves(endpoints(pair), smollm2, tokens, expected)
    wait_for(lambda: len(children(pair[0].pid)) == 1)


# a worker dies


def test_killed_while_idle(pair, victim, smollm2, tokens):
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        context.decode(tokens[:40])
        context.logits()
        kill(victim(pair[0]))
        with pytest.raises(WorkerLost) as caught:
            for token in tokens:
                context.decode_one(token)
                context.synchronize()
        assert_tells(caught.value, pair[0].endpoint, "RPC0")
        with pytest.raises(WorkerLost):
            cluster.check()


@pytest.mark.parametrize(("which", "victim"), [(0, session_of), (1, supervisor_of)])
def test_killed_during_load(pair, which, victim, smollm2):
    calls: list[float] = []

    def progress(fraction: float) -> bool:
        calls.append(fraction)
        if len(calls) == 40:
            kill(victim(pair[which]))
        return True

    with caravan.connect(endpoints(pair)) as cluster:
        with pytest.raises(WorkerLost) as caught:
            Model(smollm2, devices=cluster.devices, progress=progress)
        assert_tells(caught.value, pair[which].endpoint, f"RPC{which}")
        assert len(calls) >= 40
        assert max(calls) < 1


@pytest.mark.parametrize("which", [0, 1])
def test_killed_in_a_prompt(pair, which, victim, smollm2, tokens):
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        with (
            in_the_middle(cluster, lambda: kill(victim(pair[which]))),
            pytest.raises(WorkerLost) as caught,
        ):
            context.decode(tokens)
            context.synchronize()
        assert_tells(caught.value, pair[which].endpoint, f"RPC{which}")
        for call in (lambda: context.decode(tokens[:4]), context.logits, context.save_state):
            with pytest.raises(WorkerLost):
                call()
        with pytest.raises(WorkerLost):
            Context(model, PARAMS)
        with pytest.raises(WorkerLost):
            Model(smollm2, devices=cluster.devices)


def test_killed_during_decode(pair, smollm2):
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        pieces = caravan.generate(context, "One, two,", sampling=SamplingParams(temp=0))
        seen = [next(pieces) for _ in range(5)]
        kill(session_of(pair[1]))
        with pytest.raises(WorkerLost) as caught:
            seen.extend(pieces)
        assert_tells(caught.value, pair[1].endpoint, "RPC1")
        assert all(seen)


def test_killed_while_closing(pair, victim, smollm2, tokens):
    cluster = caravan.connect(endpoints(pair))
    model = Model(smollm2, devices=cluster.devices)
    context = Context(model, PARAMS)
    context.decode(tokens)
    kill(victim(pair[0]))
    context.close()
    kill(victim(pair[1]))
    model.close()
    cluster.close()


def test_the_other_worker_serves_on(pair, smollm2, tokens, expected):
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        with in_the_middle(cluster, lambda: kill(session_of(pair[0]))), pytest.raises(WorkerLost):
            context.decode(tokens)
            context.synchronize()
        # in the middle of the failure, and after it
        serves([pair[1].endpoint], smollm2, tokens, expected)
    serves(endpoints(pair), smollm2, tokens, expected)


def test_killed_with_the_base_protocol(pair, smollm2, tokens, expected):
    with (
        caravan.connect(endpoints(pair), extension=False) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        with (
            in_the_middle(cluster, lambda: kill(session_of(pair[1]))),
            pytest.raises(WorkerLost) as caught,
        ):
            context.decode(tokens)
            context.synchronize()
        assert_tells(caught.value, pair[1].endpoint, "RPC1")
    serves(endpoints(pair), smollm2, tokens, expected)


# a worker stands still


@pytest.mark.parametrize("extension", [True, False], ids=["extension", "base"])
def test_frozen_in_a_prompt(extension, pair, smollm2, tokens, expected):
    with (
        caravan.connect(endpoints(pair), timeout=1.0, extension=extension) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        frozen = [pair[1].pid, *children(pair[1].pid)]
        try:
            with (
                in_the_middle(cluster, lambda: [kill(pid, signal.SIGSTOP) for pid in frozen]),
                pytest.raises(WorkerLost) as caught,
            ):
                context.decode(tokens)
                context.synchronize()
            assert_tells(caught.value, pair[1].endpoint, "RPC1")
            assert isinstance(caught.value.cause, TransportTimeout)
            assert "no sign of life for 1 s" in str(caught.value)
        finally:
            for pid in frozen:
                kill(pid, signal.SIGCONT)
    serves(endpoints(pair), smollm2, tokens, expected)
    wait_for(lambda: len(children(pair[1].pid)) == 1)


def test_slow_is_not_frozen(pair, smollm2, tokens):
    """A computation much longer than the bound, on both workers."""
    params = ContextParams(n_ctx=512, n_ubatch=512)
    with (
        caravan.connect(endpoints(pair), timeout=0.5) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, params) as context,
    ):
        started = time.monotonic()
        context.decode(tokens)
        context.synchronize()
        if time.monotonic() - started < 1.0:
            pytest.skip("this machine is too fast for this test")


def test_a_head_that_stood_still_goes_on(pair, smollm2):
    """Its clock went on, its worker's answer has been there all the time."""
    options = ["-m", str(smollm2), "-p", "One, two, three,", "-n", "40", "--temp", "0"]
    run = subprocess.Popen(
        command(
            "run", *options, "--timeout=1", "--split=memory", "--rpc", ",".join(endpoints(pair))
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        time.sleep(1.0)
        kill(run.pid, signal.SIGSTOP)
        time.sleep(2.0)
        kill(run.pid, signal.SIGCONT)
        out, err = run.communicate(timeout=BOUND)
    finally:
        run.kill()
    assert (run.returncode, len(out) > 20) == (0, True), err


def test_frozen_during_load(pair, smollm2, tokens, expected):
    frozen: list[int] = []
    calls: list[float] = []

    def progress(fraction: float) -> bool:
        calls.append(fraction)
        if len(calls) == 40:
            # the session that serves us may have been started for us
            frozen.extend((pair[0].pid, *children(pair[0].pid)))
            for pid in frozen:
                kill(pid, signal.SIGSTOP)
        return True

    try:
        with caravan.connect(endpoints(pair), timeout=1.0) as cluster:
            with pytest.raises(WorkerLost) as caught:
                Model(smollm2, devices=cluster.devices, progress=progress)
            assert max(calls) < 1
            assert_tells(caught.value, pair[0].endpoint, "RPC0")
    finally:
        for pid in frozen:
            kill(pid, signal.SIGCONT)
    serves(endpoints(pair), smollm2, tokens, expected)


def test_frozen_while_closing(pair, smollm2, tokens):
    with (
        caravan.connect(endpoints(pair), timeout=1.0) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        context.decode(tokens)
        frozen = [pair[1].pid, *children(pair[1].pid)]
        for pid in frozen:
            kill(pid, signal.SIGSTOP)
    for pid in frozen:
        kill(pid, signal.SIGCONT)
    wait_for(lambda: len(children(pair[1].pid)) == 1)


# Ctrl-C, where it is caught


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_connecting_lets_go_of_the_workers(pair):
    with peer(None) as silent:
        timer = threading.Timer(0.7, press)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            caravan.connect([pair[0].endpoint, silent], timeout=2.0)
        timer.join()
        wait_for(lambda: len(children(pair[0].pid)) == 1)
    names = {thread.name for thread in threading.enumerate()}
    assert not {name for name in names if name.startswith(("caravan-watch", "caravan-recv"))}


@pytest.mark.parametrize("what", ["free", "get_tensor"])
def test_ctrl_c_inside_of_a_callback(what, pair, smollm2, tokens, expected):
    """It surfaces after the call, and costs no device."""
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        other = Context(model, PARAMS)
        other.decode(tokens[:8])
        other.synchronize()
        link = cluster.devices[0].link
        own, presses = getattr(link, what), iter([press])

        def pressed(*arguments):
            for act in presses:
                act()
            return own(*arguments)

        setattr(link, what, pressed)
        with pytest.raises(KeyboardInterrupt):
            other.close() if what == "free" else other.save_state()
        delattr(link, what)
        other.close()
        check(context, tokens, expected)


# a connection breaks


def test_a_cut_connection(pair, smollm2, tokens, expected):
    with (
        Relay(pair[0].endpoint) as cut,
        caravan.connect([cut.endpoint, pair[1].endpoint]) as cluster,
        Model(smollm2, devices=cluster.devices) as model,
        Context(model, PARAMS) as context,
    ):
        check(context, tokens, expected)
        with in_the_middle(cluster, cut.cut), pytest.raises(WorkerLost) as caught:
            context.decode(tokens)
            context.synchronize()
        assert_tells(caught.value, cut.endpoint, "RPC0")
    serves(endpoints(pair), smollm2, tokens, expected)


# an allocation is refused


def test_a_refused_allocation_leaves_everything_usable(pair, smollm2, tokens, expected):
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices, fit=False) as model,
        Context(model, PARAMS) as context,
    ):
        for _ in range(2):
            with pytest.raises(ContextError, match=r"RPC[01] at 127\.0\.0\.1:\d+: .*no room"):
                Context(model, ContextParams(n_ctx=8_000_000))
        check(context, tokens, expected)
        with Context(model, PARAMS) as other:
            check(other, tokens, expected)


@pytest.mark.parametrize("devices", [0, 2])
def test_a_context_that_would_end_this_process_is_refused(devices, pair, smollm2):
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices[:devices]) as model,
        pytest.raises(ContextError, match="no context of 2000000000 tokens"),
    ):
        Context(model, ContextParams(n_ctx=2_000_000_000))


# several heads


HEAD = """
import sys, caravan
with (
    caravan.connect(sys.argv[2:]) as cluster,
    caravan.Model(sys.argv[1], devices=cluster.devices) as model,
    caravan.Context(model, caravan.ContextParams(n_ctx=512, n_ubatch=32)) as context,
):
    print("ready", flush=True)
    while True:
        context.clear()
        context.decode(range(100, 400))
        context.synchronize()
"""


def test_one_of_two_heads_is_killed(pair, smollm2, tokens, expected):
    head = subprocess.Popen(
        [sys.executable, "-c", HEAD, str(smollm2), *endpoints(pair)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert head.stdout.readline() == "ready\n"
        with (
            caravan.connect(endpoints(pair)) as cluster,
            Model(smollm2, devices=cluster.devices) as model,
            Context(model, PARAMS) as context,
        ):
            check(context, tokens, expected)
            kill(head.pid)
            for _ in range(2):
                check(context, tokens, expected)
    finally:
        head.kill()
        head.wait()
        head.stdout.close()
    for worker in pair:
        wait_for(lambda pid=worker.pid: len(children(pid)) == 1)


def test_sixteen_sessions_leave_nothing(pair, smollm2, tokens, expected):
    with caravan.connect([pair[0].endpoint]):
        pass
    wait_for(lambda: len(children(pair[0].pid)) == 1)
    before = descriptors(os.getpid()), descriptors(pair[0].pid), threading.active_count()
    for _ in range(16):
        caravan.connect([pair[0].endpoint]).close()
    wait_for(lambda: len(children(pair[0].pid)) == 1)
    wait_for(lambda: descriptors(pair[0].pid) == before[1])
    assert (descriptors(os.getpid()), threading.active_count()) == (before[0], before[2])
    serves([pair[0].endpoint], smollm2, tokens, expected)


def test_a_worker_comes_back_on_its_port(smollm2, tokens, expected):
    worker = caravan.Worker("CPU:1")
    try:
        endpoint = worker.endpoint
        port = int(endpoint.rpartition(":")[2])
        with (
            caravan.connect([endpoint]) as cluster,
            Model(smollm2, devices=cluster.devices) as model,
            Context(model, PARAMS) as context,
        ):
            check(context, tokens, expected)
            kill(worker.pid)
            worker.close()
            back = Side(lambda: connect_again(endpoint))
            worker = caravan.Worker("CPU:1", port=port)
            with pytest.raises(WorkerLost):
                context.decode(tokens)
                context.synchronize()
            back.join().close()
        serves([endpoint], smollm2, tokens, expected)
    finally:
        worker.close()


def connect_again(endpoint: str) -> caravan.Cluster:
    deadline = time.monotonic() + BOUND
    while True:
        try:
            return caravan.connect([endpoint], timeout=5.0)
        except TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_two_threads_on_one_cluster(pair, smollm2, tokens, expected):
    """Two models with the devices in opposite orders, two contexts of one of them."""
    with (
        caravan.connect(endpoints(pair)) as cluster,
        Model(smollm2, devices=cluster.devices) as one,
        Model(smollm2, devices=cluster.devices[::-1]) as two,
        Context(one, PARAMS) as first,
        Context(one, PARAMS) as second,
        Context(two, PARAMS) as third,
    ):

        def work(context: Context) -> None:
            for _ in range(4):
                check(context, tokens, expected)
            for _ in range(3):
                check_steps(context, tokens, expected)

        sides = [Side(lambda c=context: work(c)) for context in (first, second, third)]
        for side in sides:
            side.join()


def check_steps(context: Context, tokens: list[int], expected: np.ndarray) -> None:
    """Other sizes in between, so that graphs are rebuilt while the other thread computes."""
    context.clear()
    context.decode(tokens[:37])
    for token in tokens[37:39]:
        context.decode_one(token)
    context.clear()
    check(context, tokens, expected)


# closing, in every order


@pytest.mark.parametrize("idle", [True, False])
def test_a_closed_cluster_gives_errors_and_not_zeros(idle, pair, smollm2, tokens):
    cluster = caravan.connect(endpoints(pair))
    model = Model(smollm2, devices=cluster.devices)
    context = Context(model, PARAMS)
    context.decode(tokens[:8])
    if idle:
        context.synchronize()
        context.logits()
    cluster.close()
    for call in (
        lambda: context.decode(tokens[:4]),
        context.logits,
        context.save_state,
        cluster.check,
        lambda: Context(model, PARAMS),
        lambda: Model(smollm2, devices=cluster.devices),
    ):
        with pytest.raises(WorkerLost, match="closed"):
            call()
    context.close()
    model.close()


@pytest.mark.parametrize("lost", [False, True], ids=["well", "lost"])
@pytest.mark.parametrize("order", ["context model cluster", "cluster context model", "nothing"])
def test_any_order_of_closing(order, lost, pair, smollm2, tokens, expected):
    things = {}
    things["cluster"] = caravan.connect(endpoints(pair))
    things["model"] = Model(smollm2, devices=things["cluster"].devices)
    things["context"] = Context(things["model"], PARAMS)
    things["context"].decode(tokens)
    if lost:
        kill(session_of(pair[1]))
        with pytest.raises(WorkerLost):
            things["context"].synchronize()
    for name in order.split():
        if name in things:
            things.pop(name).close()
    if things:
        # garbage, whose connections are closed here because they hold threads
        cluster = things["cluster"]
        things.clear()
        gc.collect()
        cluster.close()
    serves(endpoints(pair), smollm2, tokens, expected)


EXIT = """
import os, signal, sys, threading, caravan
from pathlib import Path
workers = caravan.LocalWorkers(2)
cluster = caravan.connect(workers.endpoints)
model = caravan.Model(sys.argv[1], devices=cluster.devices)
context = caravan.Context(model, caravan.ContextParams(n_ctx=512, n_ubatch=32))
tokens = model.tokenize("The caravan left the oasis before dawn. " * 20)
what = sys.argv[2]
if what == "prompt":
    context.decode(tokens)
elif what == "generator":
    pieces = caravan.generate(context, "One, two,")
    next(pieces)
elif what == "lost":
    os.kill(workers.workers[0].pid, signal.SIGKILL)
    try:
        context.decode(tokens)
        context.synchronize()
    except caravan.WorkerLost as exc:
        kept = exc
elif what == "cycle":
    loop = [workers, cluster, model, context]
    loop.append(loop)
    del workers, cluster, model, context
elif what == "thread":
    threading.Thread(target=lambda: context.decode(tokens)).start()
elif what == "daemon":
    threading.Thread(target=lambda: context.decode(tokens), daemon=True).start()
    import time
    time.sleep(0.3)
"""


@pytest.mark.parametrize(
    "what", ["idle", "prompt", "generator", "lost", "cycle", "thread", "daemon"]
)
def test_the_interpreter_ends_with_everything_open(what, smollm2):
    strict = ("-X", "dev", "-W", "ignore::ResourceWarning")
    done = subprocess.run(
        [sys.executable, *strict, "-c", EXIT, str(smollm2), what],
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# helpers


def assert_tells(error: WorkerLost, endpoint: str, device: str) -> None:
    """The error says where, which, what and why."""
    assert (error.endpoint, error.device) == (endpoint, device)
    assert error.command
    assert str(error.cause)
    assert str(error) == f"lost {device} at {endpoint} during {error.command}: {error.cause}"
    assert "\n" not in str(error)


@contextlib.contextmanager
def in_the_middle(cluster: caravan.Cluster, act: Callable[[], object]) -> Iterator[None]:
    """Do `act` on another thread once the last device has been sent its third graph or so."""
    stream = cluster.devices[-1].link.stream
    start = stream.commands
    stop = threading.Event()

    def watch() -> None:
        # a copy, other inputs, the graph
        while stream.commands - start < 3 * 3 and not stop.wait(0.001):
            pass
        act()

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
