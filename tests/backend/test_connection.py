"""A worker that was lost and came back: the same devices, another session, nothing of the old."""

from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest

import caravan
from caravan.backend import cluster as clusters
from caravan.backend.backend import backends
from caravan.backend.buffer import buffers
from caravan.errors import (
    AllocationError,
    AuthenticationError,
    ConnectError,
    ContextError,
    ProtocolError,
    UsageError,
    WorkerLost,
    WorkerStartError,
)
from caravan.llm import Context, ContextParams, Model
from caravan.worker import local
from e2e.processes import children, kill, session_of, wait_for

PARAMS = ContextParams(n_ctx=64, n_ubatch=32)
TOKENS = [1, 2, 3, 4]


@pytest.fixture
def worker():
    with caravan.Worker("CPU:1,CPU:2") as worker:
        yield worker


def lose(worker: caravan.Worker, cluster: caravan.Cluster) -> None:
    kill(session_of(worker))
    wait_for(lambda: cluster.devices[0].connection.lost)


def test_a_device_is_the_same_with_a_new_session(worker):
    with caravan.connect([worker.endpoint]) as cluster:
        connection = cluster.devices[0].connection
        before = [(device.handle, device.name, device.link) for device in cluster.devices]
        connection.reopen()
        assert connection.lost is None
        assert [device.link for device in cluster.devices] == [link for _, _, link in before]
        cluster.poll, cluster.wire_dtype = 7, "f16"
        holds = [device.hold() for device in cluster.devices]
        lose(worker, cluster)
        connection.reopen()
        cluster.check()
        for device, (handle, name, link) in zip(cluster.devices, before, strict=True):
            assert (device.handle, device.name) == (handle, name)
            assert device.link is not link
            assert device.link.stream.device == name
            assert device.poll == 7
            assert device.memory()[1] > 0
        # what was put there before is lost all the same
        for hold in holds:
            with pytest.raises(WorkerLost):
                hold.check()
        assert len(cluster.stats()) == 2


def test_all_of_a_worker_is_lost_with_one_device(worker):
    with caravan.connect([worker.endpoint]) as cluster:
        one, other = (device.link.stream for device in cluster.devices)
        one.fail(ConnectError("cut"), "TEST")
        cluster.devices[1].connection.reopen()
        # its worker may have ended it before this end did
        assert other.lost is not None
        cluster.check()


def test_nothing_of_an_old_buffer_goes_to_a_new_session(worker, smollm2):
    """Both sessions number their buffers alike: what is freed late must not free another one."""
    with caravan.connect([worker.endpoint]) as cluster:
        old = Model(smollm2, devices=cluster.devices)
        with Context(old, PARAMS) as context:
            context.decode(TOKENS)
            expected = context.logits()
            lose(worker, cluster)
            cluster.devices[0].connection.reopen()
            dead = set(buffers)
            computing = set(backends)
            with Model(smollm2, devices=cluster.devices) as model:
                assert {buffers[p].handle for p in dead} & {
                    buffer.handle for p, buffer in buffers.items() if p not in dead
                }
                assert all(backends[p].link.stream.ended for p in computing)
                with Context(model, PARAMS) as again:
                    for use in (
                        lambda: context.decode(TOKENS),
                        context.logits,
                        context.save_state,
                        lambda: Context(old, PARAMS),
                    ):
                        with pytest.raises((WorkerLost, ContextError)):
                            use()
                    context.close()
                    old.close()
                    assert not dead & set(buffers)
                    again.decode(TOKENS)
                    assert np.array_equal(again.logits(), expected)
                    weights = sum(device.allocated()["weights"] for device in cluster.devices)
                    assert weights > 0


def test_a_worker_that_is_not_there_yet(worker):
    with caravan.connect([worker.endpoint]) as cluster:
        connection = cluster.devices[0].connection
        endpoint, port = worker.endpoint, int(worker.endpoint.rpartition(":")[2])
        worker.close()
        wait_for(lambda: connection.lost)
        for _ in range(2):
            with pytest.raises(ConnectError, match="refused"):
                connection.reopen()
        with caravan.Worker("CPU:1,CPU:2", port=port) as back:
            assert back.endpoint == endpoint
            connection.reopen()
            cluster.check()
            assert "open" in repr(connection)


@pytest.mark.parametrize(
    ("devices", "match"),
    [
        ("CPU:1", "came back with 1 devices instead of 2"),
        ("sim:GFLOPS=1,GBPS=1,sim:GFLOPS=1,GBPS=1", "another device for RPC0: .* instead of "),
    ],
)
def test_a_worker_with_other_devices_is_refused(worker, devices, match):
    with caravan.connect([worker.endpoint]) as cluster:
        connection = cluster.devices[0].connection
        port = int(worker.endpoint.rpartition(":")[2])
        worker.close()
        wait_for(lambda: connection.lost)
        with caravan.Worker(devices, port=port) as other:
            with pytest.raises(ProtocolError, match=match):
                connection.reopen()
            assert connection.lost
            # it does not keep what nobody uses
            wait_for(lambda: len(children(other.pid)) == 1)


def test_a_worker_that_does_not_ask_for_the_token_any_more_is_another_one(tmp_path):
    """Somebody else may listen there by now, and answer whatever a worker would."""
    token = "a token of 24 characters"
    (tmp_path / "token").write_text(token)
    (tmp_path / "token").chmod(0o600)
    with (
        caravan.Worker("CPU:1", options=("--token-file", str(tmp_path / "token"))) as worker,
        caravan.connect([worker.endpoint], token=token) as cluster,
    ):
        connection = cluster.devices[0].connection
        port = int(worker.endpoint.rpartition(":")[2])
        worker.close()
        wait_for(lambda: connection.lost)
        with caravan.Worker("CPU:1", port=port):
            with pytest.raises(AuthenticationError, match="asked for a token before"):
                connection.reopen()
            assert connection.lost


@pytest.mark.parametrize("change", ["engine", "memory", "extension"])
def test_whatever_would_not_go_together_with_what_was_there(change, worker, monkeypatch):
    with caravan.connect([worker.endpoint]) as cluster:
        connection = cluster.devices[0].connection
        session = connection.session
        link = session.links[1]
        if change == "engine":
            monkeypatch.setattr(session, "engine", "0.0.1")
        elif change == "memory":
            link.info = replace(link.info, memory_total=link.info.memory_total // 2)
        else:
            link.extension = False
        lose(worker, cluster)
        with pytest.raises(ProtocolError, match=r"came back with (ggml|another device for RPC1)"):
            connection.reopen()


def test_a_cluster_that_was_closed_takes_nothing_new(worker, monkeypatch):
    """Also when it is closed while the new session is being opened."""
    cluster = caravan.connect([worker.endpoint])
    connection = cluster.devices[0].connection
    lose(worker, cluster)
    opening, go_on = threading.Event(), threading.Event()
    errors: list[Exception] = []
    open_one = connection._open_one

    def slowly():
        opening.set()
        assert go_on.wait(30)
        return open_one()

    def reopen() -> None:
        try:
            connection.reopen()
        except UsageError as exc:
            errors.append(exc)

    monkeypatch.setattr(connection, "_open_one", slowly)
    thread = threading.Thread(target=reopen)
    thread.start()
    assert opening.wait(30)
    cluster.close()
    go_on.set()
    thread.join(30)
    assert "was closed" in str(errors[0])
    wait_for(lambda: len(children(worker.pid)) == 1)
    with pytest.raises(UsageError, match="was closed"):
        connection.reopen()


def test_registered_devices_do_not_come_back(worker):
    with caravan.connect([worker.endpoint]) as cluster:
        lose(worker, cluster)
        cluster.devices[0].published = True
        with pytest.raises(UsageError, match="registered"):
            cluster.devices[0].connection.reopen()
        cluster.devices[0].published = False


# workers of our own


@pytest.mark.parametrize("private", [False, True])
def test_a_worker_of_our_own_is_started_anew(private, scratch):
    with caravan.Worker("CPU:1", private=private) as worker:
        endpoint, pid = worker.endpoint, worker.pid
        with caravan.connect([endpoint]) as cluster:
            local.restart(endpoint)
            assert worker.pid == pid
            kill(pid)
            wait_for(lambda: cluster.devices[0].connection.lost)
            cluster.devices[0].connection.reopen()
            assert worker.pid != pid
            assert worker.endpoint == endpoint
            assert cluster.devices[0].stats() is not None
    assert list(scratch.iterdir()) == []
    local.restart(endpoint)


def test_a_local_device_is_started_anew(scratch):
    with caravan.connect(["local:CPU:1", "local:CPU:1"]) as cluster:
        workers = [local._ours[endpoint] for endpoint in cluster.endpoints]
        kill(workers[1].pid)
        wait_for(lambda: cluster.devices[1].connection.lost)
        cluster.devices[1].connection.reopen()
        cluster.check()
        assert cluster.devices[1].name == "local:CPU:1#2"
    assert list(scratch.iterdir()) == []
    assert not any(worker.pid for worker in workers)


def test_one_that_cannot_be_started_anew(monkeypatch):
    with caravan.Worker("CPU:1") as worker, caravan.connect([worker.endpoint]) as cluster:
        kill(worker.pid)
        wait_for(lambda: cluster.devices[0].connection.lost)
        with monkeypatch.context() as patched:
            patched.setattr(local.sys, "executable", "/bin/false")
            for _ in range(2):
                with pytest.raises(WorkerStartError):
                    cluster.devices[0].connection.reopen()
        cluster.devices[0].connection.reopen()
        cluster.check()


def test_a_refused_allocation_is_no_loss(worker):
    """So that whoever comes back too early can tell."""
    with caravan.connect([worker.endpoint]) as cluster:
        with pytest.raises(AllocationError):
            cluster.devices[0].link.alloc(1 << 60)
        assert cluster.devices[0].connection.lost is None
    assert clusters.Connection is not None
