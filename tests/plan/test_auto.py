"""How a split is chosen when a model is loaded, what is told of it, and what is done in trouble."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from caravan import interrupt
from caravan.errors import DecodeError, WorkerLost
from caravan.llm.params import ContextParams, ModelParams
from caravan.llm.splitter import SplitRequest
from caravan.models.fake import FakeModel
from caravan.plan import auto, steps
from caravan.plan.auto import AutoSplit, EvenSplit, length_of, splitter_of, told
from caravan.plan.job import Job
from caravan.plan.pipeline import HeadTimes, Setting, Traffic
from caravan.plan.profile import ClusterProfile, DeviceProfile, LinkProfile
from caravan.plan.setting import micro_batches
from caravan.plan.times import DeviceTimes, Grid
from llm.fakes import FakeDevice

LAYERS = 8


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("auto") / "small.gguf"
    model = FakeModel(layers=LAYERS, embd=256, heads=4, kv_heads=2, ff=512, vocab=300, ctx=512)
    model.write(file)
    return file


def times(seconds: float, output: float) -> DeviceTimes:
    """Of a device that takes so long for a layer and a token, and for the output of a token."""
    tokens = (1, 512)
    layers = [[[n * seconds] * LAYERS + [0.0]] for n in tokens]
    step = [[[seconds] * LAYERS + [output]]]
    return DeviceTimes(Grid(tokens, (256,), np.array(layers)), Grid((1,), (256,), np.array(step)))


def setting_of(*seconds: float, output: float = 0.0) -> Setting:
    names = [f"RPC{number}" for number in range(len(seconds))]
    cluster = ClusterProfile(
        tuple(DeviceProfile(name, 1.0, 1.0) for name in names), (LinkProfile(),) * len(names)
    )
    return Setting(
        cluster,
        tuple(times(one, output * one) for one in seconds),
        Traffic(1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0),
        HeadTimes(0.0, 0.0, 0.0, 0.0, 0.0),
        LAYERS,
        n_ctx=512,
    )


def request(path: Path, count: int = 2, room: int = 1000, **more: object) -> SplitRequest:
    values: dict[str, object] = {
        "params": ModelParams(),
        "devices": tuple(FakeDevice(f"RPC{number}") for number in range(count)),
        "context": ContextParams(n_ctx=512),
        "layers": [10] * LAYERS + [30],
        "room": [room] * count,
        "split": [float(LAYERS + 1), *[0.0] * (count - 1)],
    }
    return SplitRequest(path, **{**values, **more})  # type: ignore[arg-type]


class Told:
    """A splitter for tests: no measuring, and answers that are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: tuple[int, ...] | None) -> None:
        self.lines: list[str] = []
        self.measured: list[SplitRequest] = []
        self.asked: list[tuple[list[Job], list[int], list[int]]] = []
        self.setting = setting_of(1.0, 2.0)
        self.error: BaseException | None = None
        self._answers = list(answers)
        monkeypatch.setattr(auto, "best_counts", self._best)
        self.splitter = AutoSplit((Job(64, 8),), self.lines.append, measure=self._measure)

    def _measure(self, request: SplitRequest, jobs: object, step: auto.Say) -> Setting:
        step("measuring RPC0")
        self.measured.append(request)
        if self.error is not None:
            raise self.error
        return self.setting

    def _best(self, setting, devices, jobs, layers, room):
        self.asked.append((list(jobs), list(layers), list(room)))
        return self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]


def test_it_measures_asks_and_tells(monkeypatch, path):
    fake = Told(monkeypatch, (6, 3))
    assert fake.splitter.split(request(path)) == [6.0, 3.0]
    assert fake.lines == []
    fake.splitter.settled(True)
    assert fake.lines == ["split 6/3 by time: RPC0 is 2.0 times as fast as RPC1"]
    assert len(fake.asked) == 1
    assert fake.asked[0] == ([Job(64, 8)], [10] * LAYERS + [30], [1000, 1000])


def test_what_takes_long_is_told(monkeypatch, path):
    monkeypatch.setattr(steps, "_PATIENCE", 0.001)
    fake = Told(monkeypatch, (6, 3))
    told = [threading.Event(), threading.Event()]

    def measure(request: SplitRequest, jobs: object, step: auto.Say) -> Setting:
        for number, event in enumerate(told):
            step(f"measuring RPC{number}")
            assert event.wait(10)
        return fake.setting

    def say(line: str) -> None:
        fake.lines.append(line)
        told[min(len(fake.lines), 2) - 1].set()

    assert AutoSplit(say=say, measure=measure).split(request(path)) == [6.0, 3.0]
    assert fake.lines == ["measuring RPC0 …", "measuring RPC1 …"]


def test_a_split_that_is_not_taken_is_told(monkeypatch, path):
    fake = Told(monkeypatch, (6, 3))
    fake.splitter.split(request(path))
    fake.splitter.settled(False)
    assert fake.lines == ["split by memory: the one by time does not fit"]


def test_nothing_is_measured_again_when_only_the_room_is_another(monkeypatch, path):
    fake = Told(monkeypatch, (6, 3))
    first = request(path)
    fake.splitter.split(first)
    fake.splitter.split(request(path, room=60, devices=first.devices))
    assert len(fake.measured) == 1
    fake.splitter.split(request(path, count=3))
    assert len(fake.measured) == 2


def test_memory_is_told_as_the_reason_where_it_is_one(monkeypatch, path):
    fake = Told(monkeypatch, (5, 4), (6, 3))
    assert fake.splitter.split(request(path, room=60)) == [5.0, 4.0]
    fake.splitter.settled(True)
    assert fake.lines[-1] == (
        "split 5/4 by time: RPC0 is 2.0 times as fast as RPC1, as far as memory allows"
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"layers": [10] * 4 + [30]}, "not all layers are on devices"),
        ({"params": ModelParams(overrides=(("ffn", "CPU"),))}, "some tensors are put elsewhere"),
        ({"context": ContextParams(offload_kqv=False)}, "the KV cache is not on the devices"),
    ],
)
def test_what_is_not_planned_is_told(monkeypatch, path, more, why):
    fake = Told(monkeypatch, (6, 3))
    assert fake.splitter.split(request(path, **more)) is None
    assert len(fake.lines) == 1
    assert fake.lines[0].startswith(f"split by memory: {why}")
    assert fake.measured == []


def test_a_device_that_cannot_be_measured_is_named(path):
    lines: list[str] = []
    assert AutoSplit(say=lines.append).split(request(path)) is None
    assert lines == ["split by memory: RPC0 is no device that can be measured"]


def test_a_split_that_does_not_fit_is_none(monkeypatch, path):
    fake = Told(monkeypatch, None)
    assert fake.splitter.split(request(path)) is None
    assert fake.lines[-1] == "split by memory: no other one fits"


@pytest.mark.parametrize("error", [ValueError("a\nb"), OSError("disk"), RuntimeError()])
def test_no_trouble_with_planning_keeps_a_model_from_being_loaded(monkeypatch, path, error):
    fake = Told(monkeypatch, (6, 3))
    fake.error = error
    assert fake.splitter.split(request(path)) is None
    text = "a b" if isinstance(error, ValueError) else str(error) or "RuntimeError"
    assert fake.lines[-1] == f"split by memory: no plan could be made: {text}"


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), WorkerLost("host:1", "RPC0", "GRAPH_COMPUTE", OSError("gone"))]
)
def test_losses_and_ctrl_c_come_out(monkeypatch, path, error):
    fake = Told(monkeypatch, (6, 3))
    fake.error = error
    with pytest.raises(type(error)):
        fake.splitter.split(request(path))


def test_ctrl_c_ends_the_measuring(monkeypatch, path):
    fake = Told(monkeypatch, (6, 3))
    monkeypatch.setattr(interrupt, "pending", lambda: True)
    with pytest.raises(KeyboardInterrupt):
        fake.splitter.split(request(path))


def test_what_ctrl_c_breaks_off_is_no_reason_to_split_by_memory(monkeypatch, path):
    lines: list[str] = []

    def measure(request: SplitRequest, jobs: object, step: auto.Say) -> Setting:
        monkeypatch.setattr(interrupt, "pending", lambda: True)
        raise DecodeError("decoding failed")

    with pytest.raises(KeyboardInterrupt):
        AutoSplit(say=lines.append, measure=measure).split(request(path))
    assert lines == []


def test_contexts_that_are_planned_with_have_few_lengths():
    assert length_of([Job(4, 128), Job(2000, 96, 4)]) == 4096
    assert length_of([Job(4096, 0)]) == 4096
    assert length_of([Job(4096, 1)]) == 8192
    assert length_of([]) == 4096


@pytest.mark.parametrize(
    ("setting", "counts", "line"),
    [
        (setting_of(1, 1.05), (4, 5), "split 4/5 by time: RPC0 and RPC1 are equally fast"),
        (
            setting_of(1, 1, 1, output=7),
            (4, 4, 1),
            "split 4/4/1 by time: all devices are equally fast, the output layer counts as 7"
            " layers",
        ),
        (
            setting_of(3, 1, 2),
            (2, 5, 2),
            "split 2/5/2 by time: RPC1 is the fastest, 3.0 times as fast as RPC0",
        ),
        (setting_of(1, 9), (9, 0), "split 9/0 by time: faster without RPC1"),
        (
            setting_of(9, 1, 1),
            (0, 5, 4),
            "split 0/5/4 by time: RPC1 and RPC2 are equally fast, faster without RPC0",
        ),
    ],
)
def test_the_line_says_why(setting, counts, line):
    names = [device.name for device in setting.cluster.devices]
    assert told(setting, [Job(0, 128)], names, counts) == line


def test_the_output_layer_counts_little_where_a_prompt_is_all():
    setting = setting_of(1, 2, output=7)
    assert "output" not in told(setting, [Job(512, 0)], ["RPC0", "RPC1"], (6, 3))


def test_even(path):
    lines: list[str] = []
    even = EvenSplit(lines.append)
    assert even.split(request(path)) == [4.0, 5.0]
    assert even.split(request(path, count=4)) == [2.0, 2.0, 2.0, 3.0]
    assert even.split(request(path, count=3, layers=[10] * 4)) == [1.0, 1.0, 2.0]
    assert lines == []
    assert even.split(request(path, room=65)) is None
    assert lines == ["split by memory: an even one does not fit"]


def test_the_words():
    assert splitter_of("memory", (), print) is None
    assert isinstance(splitter_of("even", (), print), EvenSplit)
    assert isinstance(splitter_of("auto", (), print), AutoSplit)


def test_micro_batches():
    assert micro_batches([Job(1300, 1), Job(0, 9), Job(64, 0), Job(512, 0)], 512) == [
        64, 276, 512,
    ]  # fmt: skip
