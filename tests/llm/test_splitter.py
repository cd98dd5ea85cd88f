"""Who may say how layers are split: what is asked, when, and what is done with the answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import caravan
from caravan.errors import DoesNotFit, WorkerLost
from caravan.llm import ContextParams, Model, ModelParams
from caravan.llm.splitter import SplitRequest
from caravan.models.fake import FakeModel

LAYERS = 8
CONTEXT = ContextParams(n_ctx=512)
SIM = "sim:GFLOPS=1e6,GBPS=1e6,GIB=1"


class Scripted:
    """Gives these answers, the last one again and again."""

    def __init__(self, *answers: list[float] | BaseException | None) -> None:
        self.answers = list(answers)
        self.requests: list[SplitRequest] = []
        self.taken: list[bool] = []

    def settled(self, taken: bool) -> None:
        self.taken.append(taken)

    def split(self, request: SplitRequest) -> list[float] | None:
        self.requests.append(request)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("splitter") / "small.gguf"
    model = FakeModel(layers=LAYERS, embd=256, heads=4, kv_heads=2, ff=512, vocab=300, ctx=512)
    model.write(file)
    return file


@contextmanager
def devices(count: int = 2, limits: str = "") -> Iterator[caravan.Cluster]:
    options = ("--max-memory", limits) if limits else ()
    with (
        caravan.Worker(",".join([SIM] * count), options=options) as worker,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[caravan.Cluster]:
    with devices(3) as opened:
        yield opened


def test_it_is_asked_with_all_that_it_needs(cluster, path):
    splitter = Scripted([3.0, 6.0])
    pair = cluster.devices[:2]
    with Model(path, devices=pair, context=CONTEXT, splitter=splitter) as model:
        assert model.shares == [3, 6]
        assert model.layer_devices() == ["RPC0"] * 3 + ["RPC1"] * 6
        (request,) = splitter.requests
        assert (request.path, request.devices) == (path, tuple(pair))
        assert (request.context, request.params) == (CONTEXT, ModelParams())
        assert list(request.split) == [4, 5]
        assert len(request.layers) == LAYERS + 1
        assert model.needs is not None
        kept = sum(need.weights + need.kv for need in model.needs.devices)
        assert sum(request.layers) == kept
        for device, room in zip(pair, request.room, strict=True):
            assert 0 < room < device.memory()[0]


def test_a_device_may_be_left_without_layers(cluster, path):
    splitter = Scripted([4.0, 0.0, 5.0])
    with Model(path, devices=cluster.devices, context=CONTEXT, splitter=splitter) as model:
        assert model.layer_devices() == ["RPC0"] * 4 + ["RPC2"] * 5


@pytest.mark.parametrize(
    ("params", "count"),
    [
        (ModelParams(tensor_split=(2, 1)), 2),
        (ModelParams(split_mode="none"), 2),
        (ModelParams(), 1),
    ],
)
def test_it_is_not_asked_where_there_is_nothing_to_decide(params, count, cluster, path):
    splitter = Scripted(AssertionError("asked"))
    Model(path, params, devices=cluster.devices[:count], context=CONTEXT, splitter=splitter).close()
    Model(path, params, devices=cluster.devices[:count], fit=False, splitter=splitter).close()


def test_without_advice_it_goes_by_memory(cluster, path):
    splitter = Scripted(None)
    with Model(path, devices=cluster.devices[:2], context=CONTEXT, splitter=splitter) as model:
        assert model.shares == [4, 5]
    assert len(splitter.requests) == 1
    assert splitter.taken == []


def test_an_answer_that_does_not_fit_is_not_taken(path):
    # neither has room for all
    with devices(2, "16MiB,16MiB") as cluster:
        splitter = Scripted([9.0, 0.0], [5.0, 4.0])
        with Model(path, devices=cluster.devices, context=CONTEXT, splitter=splitter) as model:
            assert model.shares == [5, 4]
        assert len(splitter.requests) == 2
        assert splitter.taken == [True]
        # what is asked for again and again, and what never fits
        for answers in ([[9.0, 0.0]], [[9.0, 0.0], [0.0, 9.0], [8.0, 1.0], [4.0, 5.0]]):
            splitter = Scripted(*answers)
            with Model(path, devices=cluster.devices, context=CONTEXT, splitter=splitter) as model:
                assert model.needs is not None and model.needs.fits
            assert len(splitter.requests) == min(3, len(answers) + 1)
            assert splitter.taken == [False]


def test_it_is_asked_also_where_nothing_is_refused(cluster, path):
    splitter = Scripted([3.0, 6.0])
    pair = cluster.devices[:2]
    with Model(path, devices=pair, context=CONTEXT, fit=False, splitter=splitter) as model:
        assert (model.shares, model.needs) == ([3, 6], None)


def test_what_fits_in_no_way_is_refused_without_asking(path):
    splitter = Scripted(AssertionError("asked"))
    with devices(2, "2MiB,2MiB") as cluster, pytest.raises(DoesNotFit, match="RPC0"):
        Model(path, devices=cluster.devices, context=CONTEXT, splitter=splitter)


def test_its_errors_come_out(cluster, path):
    lost = WorkerLost("host:1", "RPC0", "GRAPH_COMPUTE", OSError("gone"))
    for error in (lost, KeyboardInterrupt()):
        with pytest.raises(type(error)):
            Model(path, devices=cluster.devices, context=CONTEXT, splitter=Scripted(error))


def test_it_is_asked_again_when_devices_are_lost(cluster, path):
    splitter = Scripted([3.0, 3.0, 3.0], [2.0, 7.0])
    with Model(path, devices=cluster.devices, context=CONTEXT, splitter=splitter) as model:
        assert model.shares == [3, 3, 3]
        model._free()
        model.put_on([cluster.devices[0], cluster.devices[2]])
        model.load()
        assert model.layer_devices() == ["RPC0"] * 2 + ["RPC2"] * 7
    assert [len(request.devices) for request in splitter.requests] == [3, 2]
