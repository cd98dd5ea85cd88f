"""What is kept of measurements, and when it counts for nothing."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from caravan.plan.layers import ClassTimes
from caravan.plan.profile import DeviceProfile
from caravan.plan.store import Identity, Store

IDENTITY = Identity("lab1:50052", "Some GPU", 0, "0.26.0", 1 << 34)
PROFILE = DeviceProfile("RPC0", 1000.0, 400.0, 1e-5, 2e-5, 5, 9, "lab1", 1e-6, check_graph=1e-3)
BLANK = DeviceProfile("RPC7", 0.0, 0.0, 0.0, 0.0, 3, 9, "lab1")
SHAPES = ((2, 3), (1, 2))


def times(value: float, measured: bool = True) -> ClassTimes:
    return ClassTimes(np.full(SHAPES[0], value), np.full(SHAPES[1], value / 2), measured)


@pytest.fixture
def store(tmp_path):
    return Store(IDENTITY, tmp_path / "profiles")


def only_file(store):
    (path,) = store._path.parent.iterdir()
    return path


def test_speeds_are_kept_and_the_rest_is_of_now(store, tmp_path):
    assert store.profile(BLANK) is None
    store.keep_profile(PROFILE)
    again = Store(IDENTITY, tmp_path / "profiles")
    assert again.profile(BLANK) == replace(PROFILE, name="RPC7", memory_free=3)


@pytest.mark.parametrize(
    "change",
    [
        {"endpoint": "lab2:50052"},
        {"description": "Other GPU"},
        {"threads": 2},
        {"engine": "0.27.0"},
        {"memory_total": 1},
    ],
)
def test_another_device_is_another_one(store, tmp_path, change):
    store.keep_profile(PROFILE)
    assert Store(replace(IDENTITY, **change), tmp_path / "profiles").profile(BLANK) is None


def test_layers_are_kept_by_signature(store):
    store.keep_profile(PROFILE)
    store.keep_classes({"one": times(1.0), "two": times(2.0)})
    store.keep_classes({"three": times(3.0), "computed": times(4.0, measured=False)})
    found = store.classes(("one", "three", "computed", "none"), SHAPES)
    assert set(found) == {"one", "three"}
    np.testing.assert_array_equal(found["three"].prompt, times(3.0).prompt)
    np.testing.assert_array_equal(found["three"].decode, times(3.0).decode)
    assert found["three"].measured
    assert store.profile(BLANK).gflops == 1000.0
    # times of other points are none of these
    assert store.classes(("one",), ((2, 2), (1, 2))) == {}
    # with the speeds, all is measured again
    store.keep_profile(PROFILE)
    assert store.classes(("one",), SHAPES) == {}


def test_of_many_layers_the_newest_are_kept(store):
    for start in range(0, 300, 100):
        store.keep_classes({f"c{i}": times(1.0) for i in range(start, start + 100)})
    assert store.classes(("c43",), SHAPES) == {}
    assert len(store.classes([f"c{i}" for i in range(300)], SHAPES)) == 256


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[]",
        lambda text: "\0" * 100,
        lambda text: "[" * 100_000,
        lambda text: text.replace("lab1", "lab2"),
        lambda text: text.replace("1000.0", "NaN"),
        lambda text: text.replace("1000.0", "-1"),
        lambda text: text.replace("1000.0", "9" * 400),
        lambda text: text.replace("1000.0", "1e300"),
        lambda text: text.replace("1000.0", '"fast"'),
        lambda text: text.replace("1000.0", "true"),
        lambda text: text.replace("400.0", "0"),
    ],
)
def test_a_damaged_file_is_as_if_it_were_not_there(store, damage):
    store.keep_profile(PROFILE)
    path = only_file(store)
    path.write_text(damage(path.read_text()))
    assert store.profile(BLANK) is None
    store.keep_profile(PROFILE)
    assert store.profile(BLANK) is not None


@pytest.mark.parametrize(
    "value",
    [[[1.0]], "x", [[1, 2], [3]], [["a"] * 3] * 2, [[-1.0] * 3] * 2, [[1e300] * 3] * 2],
)
def test_damaged_times_are_left_out(store, value):
    store.keep_classes({"one": times(1.0), "two": times(1.0)})
    path = only_file(store)
    data = json.loads(path.read_text())
    data["layers"]["one"]["prompt"] = value
    path.write_text(json.dumps(data))
    assert set(store.classes(("one", "two"), SHAPES)) == {"two"}


def test_a_directory_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    store = Store(IDENTITY, tmp_path / "file")
    store.keep_profile(PROFILE)
    store.keep_classes({"one": times(1.0)})
    assert store.profile(BLANK) is None


def test_nothing_is_left_of_a_write_that_fails(store, monkeypatch):
    store.keep_profile(PROFILE)

    def refuse(source, target):
        raise OSError("no")

    monkeypatch.setattr("os.replace", refuse)
    store.keep_profile(replace(PROFILE, gflops=1.0))
    only_file(store)
    assert store.profile(BLANK).gflops == 1000.0
