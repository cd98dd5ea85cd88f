"""The digest of a range of a file."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from caravan.errors import ModelError
from caravan.models.digest import digest_of, digest_of_bytes
from caravan.models.tensors import Span

# of the empty input, from the specification of BLAKE3
NOTHING = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data"
    path.write_bytes(os.urandom(100_000))
    with path.open("rb") as file:
        yield file


@pytest.mark.parametrize("piece", [1, 7, 4096, 1 << 20])
@pytest.mark.parametrize("span", [Span(0, 1), Span(5, 1000), Span(99_000, 1000), Span(7, 0)])
def test_any_range_in_any_pieces(file, span, piece):
    expected = digest_of_bytes(file.read()[span.offset : span.offset + span.size])
    file.seek(3)
    assert digest_of(file.fileno(), span, piece) == expected
    assert file.tell() == 3


def test_nothing_has_the_published_digest():
    assert digest_of_bytes(b"").hex() == NOTHING


def test_a_file_that_ends_early_has_none(file):
    assert digest_of(file.fileno(), Span(99_000, 1001)) is None


def test_stopping(file):
    answers = iter([False, False, True])
    assert digest_of(file.fileno(), Span(0, 100_000), 1000, lambda: next(answers)) is None
    assert digest_of(file.fileno(), Span(0, 2000), 1000, lambda: False) is not None


def test_a_file_that_cannot_be_read(file):
    with open(os.devnull, "wb") as sink, pytest.raises(ModelError, match="cannot read"):
        digest_of(sink.fileno(), Span(0, 10))


def test_the_library_is_not_loaded_for_nothing():
    code = "import sys, caravan.models.ledger, caravan.cli.main; sys.exit('blake3' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
