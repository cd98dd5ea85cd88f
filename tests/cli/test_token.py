"""`caravan token`: a file that is whole, new, and for nobody else to read."""

from __future__ import annotations

import errno
import os
import re
import stat

import pytest

from caravan.cli.main import main
from caravan.trust.token import Token, read

TEXT = re.compile(r"[A-Za-z0-9_-]{43}\n")


def test_it_is_printed(capsys):
    told = set()
    for _ in range(3):
        assert main(["token", "new"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert TEXT.fullmatch(out)
        Token(out)
        told.add(out)
    assert len(told) == 3


def test_it_is_written_for_this_user_alone(tmp_path, capsys):
    path = tmp_path / "token"
    before = os.umask(0)
    try:
        assert main(["token", "new", "-o", str(path)]) == 0
    finally:
        os.umask(before)
    assert capsys.readouterr() == ("", f"caravan: wrote {path}\n")
    assert TEXT.fullmatch(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    said: list[str] = []
    read(path, said.append)
    assert said == []


def test_a_file_that_is_there_stays(tmp_path, capsys):
    path = tmp_path / "token"
    path.write_text("precious")
    assert main(["token", "new", "-o", str(path)]) == 2
    expected = f"caravan: error: {path} is there already; --force writes over it\n"
    assert capsys.readouterr() == ("", expected)
    assert path.read_text() == "precious"
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "nowhere")
    assert main(["token", "new", "-o", str(link)]) == 2
    assert not (tmp_path / "nowhere").exists()


def test_unless_it_is_forced(tmp_path, monkeypatch):
    path = tmp_path / "token"
    path.write_text("precious")
    path.chmod(0o644)
    assert main(["token", "new", "-o", str(path), "--force"]) == 0
    assert TEXT.fullmatch(path.read_text())
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    monkeypatch.chdir(tmp_path)
    assert main(["token", "new", "-o", "token", "--force"]) == 0
    assert os.listdir(tmp_path) == ["token"]


def test_force_without_a_file_is_wrong_usage(capsys):
    assert main(["token", "new", "--force"]) == 2
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_where_nothing_can_be_written(tmp_path, capsys, force):
    path = tmp_path / "nowhere" / "token"
    assert main(["token", "new", "-o", str(path), *force]) == 1
    expected = f"caravan: error: cannot write {path}: No such file or directory\n"
    assert capsys.readouterr() == ("", expected)


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_full_disk_leaves_what_was_there(tmp_path, monkeypatch, capsys, force):
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    path = tmp_path / "token"
    if force:
        path.write_text("precious")
    assert main(["token", "new", "-o", str(path), *force]) == 1
    assert capsys.readouterr().err == (
        f"caravan: error: cannot write {path}: No space left on device\n"
    )
    assert [file.read_text() for file in tmp_path.iterdir()] == (["precious"] if force else [])
