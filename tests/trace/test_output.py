"""A file is there whole or not at all, and is refused before the work that it is to tell of."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TextIO

import pytest

from caravan.errors import CaravanError, UsageError
from caravan.trace.output import OutputFile


def words(out: TextIO) -> None:
    out.write("words")


def broken(out: TextIO) -> None:
    out.write("half")
    raise OSError(28, "No space left on device")


def test_it_is_written_and_nothing_else_is_left(tmp_path: Path) -> None:
    file = OutputFile(tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()
    file.write(words)
    file.close()
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
    assert (tmp_path / "t.json").read_text() == "words"


def test_until_it_is_written_nothing_is_there(tmp_path: Path) -> None:
    OutputFile(tmp_path / "t.json")
    assert list(tmp_path.iterdir()) == []


def test_what_was_there_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text("before")
    file = OutputFile(path)
    with pytest.raises(CaravanError, match=r"cannot write .*t\.json: No space left"):
        file.write(broken)
    file.close()
    assert path.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_link_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real.json").write_text("before")
    (tmp_path / "link.json").symlink_to("real.json")
    file = OutputFile(tmp_path / "link.json")
    file.write(words)
    file.close()
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text() == "words"


def test_what_is_no_file_is_written_to_and_stays() -> None:
    file = OutputFile(os.devnull)
    file.write(words)
    file.close()
    assert not Path(os.devnull).is_file()


def test_a_place_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nowhere" / "t.json", Path("/proc/t.json")):
        with pytest.raises(UsageError, match="cannot write"):
            OutputFile(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anything")
def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.touch(0o400)
    with pytest.raises(UsageError, match="Permission denied"):
        OutputFile(path)
