"""`caravan cache`: what it lists, removes, finds damaged, and leaves alone."""

from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from caravan.cli.main import main
from caravan.errors import CaravanError, UsageError
from caravan.models.digest import digest_of_bytes
from caravan.models.ledger import Ledger
from caravan.wire.fnv import fnv1a_64
from caravan.worker import upkeep
from caravan.worker.store import Entry, Store
from models import handmade

DAY = 86_400
CONTENTS = (b"one" * 10, b"two" * 1000, b"three" * 400_000)
FOREIGN = b"for a head of llama.cpp" * 100


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


def fill(directory: Path) -> list[Entry]:
    """Three of Caravan's and one of llama.cpp's, last used 40, 30, 20 and 10 days ago."""
    store = Store(directory)
    for content in CONTENTS:
        with store.begin(digest_of_bytes(content).hex(), len(content)) as part:
            part.write(content)
            part.commit()
    (directory / f"{fnv1a_64(FOREIGN):016x}").write_bytes(FOREIGN)
    by_size = sorted(store.entries(), key=lambda entry: entry.size)
    order = [by_size[0], by_size[2], by_size[3], by_size[1]]
    now = time.time()
    for i, entry in enumerate(order):
        os.utime(entry.path, (now - (40 - 10 * i) * DAY,) * 2)
    found = store.entries()
    assert [entry.digest for entry in found] == [entry.digest for entry in order]
    return found


@pytest.fixture
def filled(cache: Path) -> list[Entry]:
    return fill(cache)


@pytest.fixture
def sidecar(tmp_path: Path) -> Path:
    """Of a model whose digests were computed."""
    model = tmp_path / "m.gguf"
    model.write_bytes(handmade.gguf([], []))
    assert Ledger.open(model).save()
    (path,) = (tmp_path / "cache" / "digests").glob("*.digests")
    return path


def left(directory: Path) -> list[int]:
    return [entry.size for entry in Store(directory).entries()]


# ls


def test_ls_gives_columns_for_other_programs(filled, capsys):
    assert main(["cache", "ls"]) == 0
    out, err = capsys.readouterr()
    rows = [line.split("\t") for line in out.splitlines()]
    assert [row[0] for row in rows] == [entry.digest for entry in filled]
    assert [row[1] for row in rows] == ["30", "3000", "2000000", "2300"]
    assert [row[3] for row in rows] == ["tensor"] * 3 + ["llama.cpp"]
    assert err == ""


def test_ls_on_a_terminal_fits_into_80_columns_and_sums_up(filled, cache, sidecar, monkeypatch):
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    assert main(["cache", "ls"]) == 0
    head, *rows, total, digests = screen.getvalue().splitlines()
    assert head.split() == ["DIGEST", "SIZE", "LAST", "USED", "KIND"]
    assert [row.split()[0] for row in rows] == [entry.digest[:16] for entry in filled]
    assert [" ".join(row.split()[1:3]) for row in rows] == ["30 B", "3.0 kB", "2.0 MB", "2.3 kB"]
    assert all(len(row) < 80 for row in rows)
    assert total == f"4 files, 2.0 MB in {cache}"
    assert digests == f"digests of 1 model file in {sidecar.parent}"


def test_ls_as_json(filled, cache, sidecar, capsys):
    assert main(["cache", "ls", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["directory"], found["size"]) == (str(cache), 2_005_330)
    assert found["digests"] == {"directory": str(sidecar.parent), "model_files": 1}
    first = filled[0]
    assert found["entries"][0] == {
        "digest": first.digest,
        "size": 30,
        "last_used": first.mtime,
        "kind": "tensor",
        "path": str(first.path),
    }


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_ls_of_nothing(words, cache, capsys):
    assert main(["cache", "ls", *words]) == 0
    assert json.loads(capsys.readouterr().out or "{}").get("entries", []) == []
    assert not cache.parent.exists()


def test_ls_of_nothing_on_a_terminal(cache, monkeypatch):
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    assert main(["cache", "ls"]) == 0
    assert screen.getvalue().splitlines()[0] == f"0 files, 0 B in {cache}"


def test_another_directory(tmp_path, filled, capsys):
    other = tmp_path / "other"
    fill(other)
    Store(other).remove(Store(other).entries()[0])
    assert main(["cache", "ls", "--cache", str(other)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert main(["cache", "rm", "-c", str(other), "--all"]) == 0
    assert main(["cache", "verify", "-c", str(other)]) == 0
    assert left(other) == []
    assert len(filled) == 4
    assert main(["cache", "ls", "-c", str(tmp_path / "none")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_a_directory_that_cannot_be_read(cache, capsys):
    cache.parent.mkdir()
    cache.write_text("a file in its place")
    for words in (["ls"], ["rm", "--all"], ["verify"]):
        assert main(["cache", *words]) == 1
        assert capsys.readouterr() == (
            "",
            f"caravan: error: cannot read {cache}: Not a directory\n",
        )


@pytest.mark.parametrize("mtime", [1e20, -1e20])
def test_a_time_that_no_clock_shows(mtime, filled, monkeypatch, capsys):
    odd = replace(filled[0], mtime=mtime)
    monkeypatch.setattr(upkeep, "entries", lambda store: [odd])
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out.split("\t")[2] == "-"


# rm


def test_rm_by_the_beginning_of_a_digest(filled, cache, capsys):
    assert main(["cache", "rm", filled[0].digest[:9], filled[2].digest[:9].upper()]) == 0
    assert capsys.readouterr() == ("removed 2 files, 2.0 MB\n", "")
    assert left(cache) == [3000, 2300]


def test_rm_of_one_file_named_twice(filled, cache, capsys):
    assert main(["cache", "rm", filled[3].digest, filled[3].digest[:10]]) == 0
    assert capsys.readouterr().out == "removed 1 file, 2.3 kB\n"


def test_rm_takes_nothing_unless_all_names_fit(filled, cache, capsys):
    assert main(["cache", "rm", filled[0].digest, "nothing"]) == 2
    assert "no digest begins with 'nothing'" in capsys.readouterr().err
    assert main(["cache", "rm", ""]) == 2
    assert len(left(cache)) == 4


def test_names_that_fit_several():
    entries = [Entry(digest, 1, 0.0, Path(digest)) for digest in ("ab" * 8, "ab" * 32, "cd" * 32)]
    assert upkeep.named(entries, ["c"]) == [entries[2]]
    assert upkeep.named(entries, ["ab" * 8]) == [entries[0]]
    assert upkeep.named(entries, ["ab" * 9]) == [entries[1]]
    with pytest.raises(UsageError, match="2 digests begin with 'ab'"):
        upkeep.named(entries, ["ab"])


def test_the_help_of_rm_says_what_a_name_is(capsys):
    assert main(["cache", "rm", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "If a name fits no file, or several, nothing is removed." in told


def test_rm_by_age(filled, cache, capsys):
    assert main(["cache", "rm", "--older-than", "5w"]) == 0
    assert capsys.readouterr().out == "removed 1 file, 30 B\n"
    assert main(["cache", "rm", "--older-than", "25D"]) == 0
    assert main(["cache", "rm", "--older-than", "100d"]) == 0
    assert left(cache) == [2_000_000, 2300]
    assert main(["cache", "rm", "--older-than", "0.5h"]) == 0
    assert left(cache) == []


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1y", "nan", "1e9d", "", "\u0663d"])
def test_what_is_no_age(age, filled, cache, capsys):
    assert main(["cache", "rm", "--older-than", age]) == 2
    assert "is not a time such as 30d" in capsys.readouterr().err
    assert len(left(cache)) == 4


def test_rm_of_all_leaves_what_is_not_the_caches(filled, cache, sidecar, capsys):
    (cache / "notes.txt").write_text("not a weight")
    part = filled[0].path.with_name(filled[0].path.name + ".0123456789abcdef.part")
    part.write_bytes(b"left behind by a worker that was killed")
    os.utime(part, (0, 0))
    assert main(["cache", "rm", "--all"]) == 0
    assert capsys.readouterr().out == "removed 4 files, 2.0 MB\n"
    assert left(cache) == []
    assert (cache / "notes.txt").exists()
    assert not part.exists()
    assert sidecar.exists()


def test_rm_of_digests_leaves_weights(filled, cache, sidecar, capsys):
    assert main(["cache", "rm", "--digests"]) == 0
    assert capsys.readouterr().out == "removed the digests of 1 model file\n"
    assert not sidecar.exists()
    assert len(left(cache)) == 4


@pytest.mark.parametrize(
    "words",
    [[], ["--all", "--older-than", "1d"], ["--all", "ab"], ["--all", "--digests"]],
)
def test_rm_wants_to_know_exactly_what(words, filled, cache, capsys):
    assert main(["cache", "rm", *words]) == 2
    assert "name digests, or one of" in capsys.readouterr().err
    assert len(left(cache)) == 4


def test_what_cannot_be_removed_is_told_and_the_rest_goes(filled, cache, monkeypatch, capsys):
    kept = filled[1].path
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if path == kept:
            raise PermissionError(13, "Permission denied")
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert main(["cache", "rm", "--all"]) == 1
    out, err = capsys.readouterr()
    assert out == "removed 3 files, 2.0 MB\n"
    assert err == f"caravan: {kept} cannot be removed: Permission denied\n"
    kept.write_bytes(b"changed")
    assert main(["cache", "verify"]) == 1
    told = f"caravan: {kept} is damaged, and cannot be removed: Permission denied\n"
    assert capsys.readouterr().err == told


# verify


def test_verify_of_a_sound_cache(filled, cache, capsys):
    before = Store(cache).entries()
    assert main(["cache", "verify"]) == 0
    assert capsys.readouterr() == ("checked 4 files, 2.0 MB: all as they should be\n", "")
    # to be looked at is not to be used
    assert Store(cache).entries() == before


def change(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [change, cut])
@pytest.mark.parametrize("number", [1, 3])
def test_verify_removes_what_is_damaged(filled, cache, damage, number, capsys):
    path = filled[number].path
    damage(path)
    assert main(["cache", "verify"]) == 1
    out, err = capsys.readouterr()
    assert err == f"caravan: {path} was damaged and is removed\n"
    assert out.endswith(": 1 wrong\n")
    assert len(left(cache)) == 3
    assert main(["cache", "verify"]) == 0


def test_verify_draws_a_bar_on_a_terminal(filled, monkeypatch):
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    assert main(["cache", "verify"]) == 0
    assert "check 4 files" in screen.getvalue()


def test_what_vanishes_meanwhile_is_no_error(filled, cache, monkeypatch, capsys):
    """A worker may evict it between the look into the directory and the reading."""
    monkeypatch.setattr(upkeep, "entries", lambda store: filled)
    filled[0].path.unlink()
    assert main(["cache", "verify"]) == 0
    assert main(["cache", "rm", "--all"]) == 0
    assert capsys.readouterr().err == ""


def test_what_cannot_be_read_is_told_and_stays(filled, cache, monkeypatch, capsys):
    def verify(store: Store, entry: Entry) -> bool:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Store, "verify", verify)
    assert main(["cache", "verify"]) == 1
    err = capsys.readouterr().err
    assert err.count("cannot be read: Input/output error") == 4
    assert len(left(cache)) == 4


def test_the_command_shows_its_help(capsys):
    assert main(["cache"]) == 2
    assert "verify" in capsys.readouterr().err


def test_an_error_of_the_directory_is_one_of_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CaravanError):
        upkeep.entries(Store(tmp_path / "file"))
