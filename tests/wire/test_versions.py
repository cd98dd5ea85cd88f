"""Which servers this head speaks with, and what it says of the others."""

from __future__ import annotations

import pytest

from caravan.errors import VersionMismatch
from caravan.wire.versions import V7, V8, Version, check_server


@pytest.mark.parametrize(
    ("peer", "spoken"),
    [
        (Version(7, 0, 0), V7),
        (Version(7, 0, 9), V7),
        (Version(8, 0, 0), V8),
        (Version(8, 0, 255), V8),
    ],
)
def test_equal_major_and_no_newer_minor_is_accepted(peer, spoken):
    assert check_server(peer, "a:1") == spoken


@pytest.mark.parametrize(
    "peer",
    [
        Version(0, 0, 0),
        Version(6, 0, 0),
        Version(6, 9, 9),
        Version(7, 1, 0),
        Version(8, 1, 0),
        Version(9, 0, 0),
        Version(255, 255, 255),
    ],
)
def test_others_are_refused_in_words(peer):
    with pytest.raises(VersionMismatch) as caught:
        check_server(peer, "host:50052")
    text = str(caught.value)
    assert "\n" not in text
    for part in ("host:50052", str(peer), "7.0.0", "8.0.0", "ggml 0.25", "ggml 0.26"):
        assert part in text
    assert "caravan worker" in text


def test_versions_print_as_people_write_them():
    assert str(Version(7, 0, 9)) == "7.0.9"
