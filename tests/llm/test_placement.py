"""Which layer goes where: the engine's rule, with its rounding."""

from __future__ import annotations

import random
import re
from collections import Counter

import pytest

from caravan import engine
from caravan.backend import connect
from caravan.errors import UsageError
from caravan.llm import Model, ModelParams
from caravan.llm.placement import filled_layers, place_layers, whole_layers
from caravan.worker.local import LocalWorkers
from llm.fakes import FakeDevice


def test_equal_shares_of_two():
    assert place_layers(30, -1, ["A", "B"], [1, 1]) == ["A"] * 16 + ["B"] * 15


@pytest.mark.parametrize(
    ("shares", "counts"),
    [
        ([1, 1], [15, 16]),
        ([1, 1, 1], [10, 10, 11]),
        ([1, 1, 1, 1], [7, 8, 8, 8]),
        ([3, 1], [23, 8]),
        ([1], [1]),
        ([1, 99], [1, 99]),
        ([0, 0], [0, 0]),
    ],
)
def test_shares_become_whole_layers_rounded_down(shares, counts):
    assert whole_layers(30, -1, shares) == counts
    if sum(shares) and sum(counts) == 31:
        names = "ABCD"[: len(shares)]
        placed = Counter(place_layers(30, -1, names, counts))
        assert [placed[name] for name in names] == counts


@pytest.mark.parametrize("n_layer", [15, 30, 31, 79, 80])
def test_devices_that_are_nearly_alike_get_equal_layers(n_layer):
    for more in (-0.001, 0, 0.001):
        assert whole_layers(n_layer, -1, [1, 1 + more]) == whole_layers(n_layer, -1, [1, 1])


def test_every_whole_split_is_placed_as_it_says():
    for n_layer in range(3, 90):
        for shares in ([1, 1], [5, 3], [1, 1, 1], [2, 3, 4, 5], [1] * 7):
            counts = whole_layers(n_layer, -1, shares)
            names = "ABCDEFG"[: len(shares)]
            if sum(counts) == n_layer + 1:
                placed = Counter(place_layers(n_layer, -1, names, counts))
                assert [placed[name] for name in names] == counts


@pytest.mark.parametrize(
    ("sizes", "room", "counts"),
    [
        ([5, 5, 5, 5], [10, 10], [2, 2]),
        # the output layer is as large as three others
        ([5, 5, 5, 5, 5, 15], [20, 20], [4, 2]),
        ([5, 5, 5, 5, 5, 15], [50, 20], [5, 1]),
        # too much for both, and the less too much the better
        ([5, 5, 5, 5], [9, 3], [3, 1]),
        ([5, 5], [0, 9], [0, 2]),
        ([5, 5], [-3, 9, 0], [0, 2, 0]),
        ([7], [1, 9, 9], [0, 1, 0]),
        ([5, 5, 5], [9], [3]),
    ],
)
def test_layers_fill_devices_alike(sizes, room, counts):
    assert filled_layers(sizes, room) == counts


def test_no_device_has_room():
    assert filled_layers([5, 5], [0, -1]) is None


def test_what_can_fit_is_filled_so_that_it_fits():
    rng = random.Random(20261130)
    fitted = 0
    for _ in range(300):
        sizes = [rng.randint(1, 9) for _ in range(rng.randint(1, 12))]
        room = [rng.randint(0, 25) for _ in range(rng.randint(1, 4))]
        counts = filled_layers(sizes, room)
        if counts is None:
            continue
        assert sum(counts) == len(sizes)
        best = min(map(lambda split: fullest(sizes, room, split), splits(len(sizes), len(room))))
        assert fullest(sizes, room, counts) == pytest.approx(best)
        fitted += best <= 1
    assert fitted > 50


def splits(layers, devices):
    """All ways to cut so many layers into so many parts, in order."""
    if devices == 1:
        yield [layers]
        return
    for first in range(layers + 1):
        for rest in splits(layers - first, devices - 1):
            yield [first, *rest]


def fullest(sizes, room, counts):
    at, most = 0, 0.0
    for count, space in zip(counts, room, strict=True):
        used = sum(sizes[at : at + int(count)])
        at += int(count)
        if used:
            most = max(most, used / space if space > 0 else float("inf"))
    return most


def test_shares_are_proportional_and_in_order():
    placed = place_layers(99, -1, ["A", "B", "C"], [1, 2, 1])
    assert Counter(placed) == {"A": 25, "B": 50, "C": 25}
    assert placed == sorted(placed)


def test_only_the_last_layers_are_placed():
    assert place_layers(4, 2, ["A"], [7]) == ["CPU"] * 3 + ["A", "A"]
    assert place_layers(4, 99, ["A"], [7]) == ["A"] * 5
    assert place_layers(4, 0, ["A"], [7]) == ["CPU"] * 5


def test_device_without_a_share_gets_nothing():
    assert place_layers(4, -1, ["A", "B", "C"], [0, 1, 0]) == ["B"] * 5


def test_nothing_to_place_on():
    assert place_layers(2, -1, [], []) == ["CPU"] * 3


def test_single_precision_decides_at_the_border():
    # in double precision, 3/10 < 0.1 + 0.2; in the engine's single precision the two are equal
    assert place_layers(9, -1, ["A", "B"], [0.1 + 0.2, 0.7])[3] == "B"


def test_unsplit_layers_only(model):
    other = object.__new__(Model)
    other.handle = 0
    other.params = ModelParams(split_mode="row")
    with pytest.raises(UsageError, match="split mode row puts no layer on one device"):
        other.layer_devices()


def test_free_memory_decides_where_no_share_is_given(model, monkeypatch):
    from caravan.llm.planning import _shares

    devices = (FakeDevice("A", free=3), FakeDevice("B", free=1))
    assert _shares(devices, ModelParams()) == [3.0, 1.0]
    assert _shares(devices, ModelParams(tensor_split=(0.0,))) == [3.0, 1.0]
    assert _shares(devices, ModelParams(tensor_split=(1.0,))) == [1.0, 0.0]


def test_device_that_does_not_say_counts_as_the_host():
    from caravan.llm.planning import _shares

    ggml = engine.load().ggml
    _, total = ggml.dev_memory(ggml.dev_by_name(b"CPU"))
    shares = _shares((FakeDevice("A", free=0), FakeDevice("B", free=5)), ModelParams())
    assert shares[1] == 5.0
    assert 0 < shares[0] <= total


PARAMS = (
    ModelParams(),
    ModelParams(tensor_split=(0.3, 0.7)),
    ModelParams(tensor_split=(0, 1)),
    ModelParams(tensor_split=(1, 1), n_gpu_layers=7),
    ModelParams(split_mode="none", main_gpu=1),
    ModelParams(n_gpu_layers=0),
)


def test_engine_says_the_same_in_its_log(smollm2, capsys):
    with LocalWorkers(2, threads=1) as workers, connect(workers.endpoints) as cluster:
        for params in PARAMS:
            engine.set_verbose(True)
            try:
                with Model(smollm2, params, devices=cluster.devices) as model:
                    ours = model.layer_devices()
            finally:
                engine.set_verbose(False)
            log = capsys.readouterr().err
            theirs = dict(re.findall(r"layer +(\d+) assigned to device (\w+)", log))
            assert ours == [theirs[str(layer)] for layer in range(31)], params
