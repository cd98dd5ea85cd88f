"""Names of local devices: what is one, how equal ones are told apart, how many a run needs."""

from __future__ import annotations

import pytest

from caravan.errors import UsageError
from caravan.worker import names

CPU = "local:CPU:1"


@pytest.mark.parametrize(
    ("text", "yes"),
    [
        (CPU, True),
        ("local:CPU", True),
        ("local:CUDA0", True),
        ("local:", True),
        ("local:50052", False),
        ("local", False),
        ("localhost:9", False),
        ("RPC0", False),
    ],
)
def test_what_is_a_local_device(text, yes):
    assert names.is_local(text) == yes


def test_equal_ones_are_numbered():
    found = names.numbered([CPU, "RPC0", CPU, "local:CPU", CPU])
    assert found == [CPU, "RPC0", f"{CPU}#2", "local:CPU", f"{CPU}#3"]
    assert [names.spec(name) for name in found if name != "RPC0"] == ["CPU:1"] * 2 + [
        "CPU",
        "CPU:1",
    ]


def test_pipelines_that_run_in_turn_share_their_devices():
    lists = [["RPC0"], [CPU, "RPC0"], [CPU, CPU], ["local:CPU:2", CPU]]
    assert names.needed(lists) == [CPU, CPU, "local:CPU:2"]
    assert names.needed([["none"], []]) == []


def test_who_must_be_told_the_threads():
    told = ["local:CPU", CPU, "local:CUDA0"]
    assert [names.names_threads(name) for name in told] == [False, True, True]


@pytest.mark.parametrize(
    "text", ["local:", "local:CPU:0", "local:CPU:x", "local:CPU:", f"{CPU}#2", "local:CPU,CPU"]
)
def test_what_cannot_be_meant_is_refused(text):
    with pytest.raises(UsageError):
        names.check(["RPC0", text])


def test_a_prefix_alone_is_told_as_it_was_given():
    with pytest.raises(UsageError, match=r"^'local:' is not one device: expected local:NAME"):
        names.check(["local:"])


def test_only_local_devices_may_stand_twice():
    names.check([CPU, "RPC0", CPU])
    with pytest.raises(UsageError, match="'RPC0' is named twice"):
        names.check(["RPC0", CPU, "RPC0"])


@pytest.mark.parametrize(
    ("text", "separators", "parts"),
    [
        ("a,b/c", ",/", ["a", "b", "c"]),
        ("a,b/c", ",", ["a", "b/c"]),
        (" a , b ", ",", ["a", "b"]),
        ("a,,b", ",", ["a", "", "b"]),
        ("sim:X=1,Y=2,a", ",", ["sim:X=1,Y=2", "a"]),
        ("a/sim:X=1, Y=2/b", ",/", ["a", "sim:X=1,Y=2", "b"]),
        ("sim:X=1,Y=2/a,b", ",", ["sim:X=1,Y=2/a", "b"]),
        ("", ",", [""]),
    ],
)
def test_the_settings_of_a_device_stay_together(text, separators, parts):
    assert [part.replace(" ", "") for part in names.split(text, separators)] == parts
