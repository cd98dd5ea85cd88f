"""`caravan model`: what goes to stdout, and what to stderr."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import gguf
import pytest

from caravan.cli import download
from caravan.cli.main import main
from caravan.models import fetch as fetch_module
from caravan.models.catalog import SAMPLES, SMOLLM2
from splitting import split_model


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def here(cache, monkeypatch):
    """A sample that counts as fetched."""
    cache.mkdir(parents=True)
    path = cache / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    digest = fetch_module._sha256(path)
    sample = replace(
        SMOLLM2,
        name="small",
        member="x/small.gguf",
        file_size=path.stat().st_size,
        file_sha256=digest,
    )
    monkeypatch.setitem(SAMPLES, "small", sample)
    return path


def test_get_prints_only_the_path(here, capsys):
    assert main(["model", "get", "small"]) == 0
    assert capsys.readouterr() == (f"{here}\n", "")


def test_get_fetches_a_damaged_file_again(here, capsys, monkeypatch):
    whole = here.read_bytes()
    here.write_bytes(whole[:-1] + b"?")

    def refetch(sample, directory, progress):
        assert not here.exists()
        here.write_bytes(whole)
        return here

    monkeypatch.setattr("caravan.cli.model.fetch", refetch)
    assert main(["model", "get", "small"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{here}\n"
    assert "is damaged" in err


def test_get_of_an_unknown_name_fails(capsys):
    assert main(["model", "get", "nothing"]) == 1
    assert "known names: smollm2" in capsys.readouterr().err


def test_path_prints_where_it_is(here, capsys):
    assert main(["model", "path", "small"]) == 0
    assert capsys.readouterr().out == f"{here}\n"


def test_path_does_not_fetch(capsys):
    assert main(["model", "path", "smollm2"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "`caravan model get smollm2` fetches it" in err


def test_ls_says_which_are_here(here, capsys):
    assert main(["model", "ls"]) == 0
    lines = {line.split("\t")[0]: line.split("\t") for line in capsys.readouterr().out.splitlines()}
    assert lines["smollm2"][-1] == "-"
    assert lines["small"][-1] == str(here)


def test_ls_as_json(here, capsys):
    assert main(["model", "ls", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["smollm2"]["path"] is None
    assert rows["small"]["path"] == str(here)


def test_show_describes_a_file(here, capsys):
    assert main(["model", "show", str(here)]) == 0
    assert "layers\t7\n" in capsys.readouterr().out


def test_show_takes_a_name_and_prints_json(here, capsys):
    assert main(["model", "show", "small", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 7


def test_show_of_no_model_is_one_line(tmp_path, capsys):
    (tmp_path / "x").write_bytes(b"nothing")
    assert main(["model", "show", str(tmp_path / "x")]) == 1
    told = f"{tmp_path}/x is not a GGUF file: it begins with 'noth'"
    assert capsys.readouterr().err == f"caravan: error: {told}\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_ls_on_a_terminal_keeps_every_model_on_one_line(here, monkeypatch):
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    assert main(["model", "ls"]) == 0
    head, *rows = screen.getvalue().splitlines()
    assert head.split() == ["NAME", "SIZE", "LICENCE", "ABOUT", "HERE"]
    assert len(rows) == len(SAMPLES)
    (small,) = [row for row in rows if row.startswith("small ")]
    assert small.endswith(f"  {here}")
    assert small.index(str(here)) == head.index("HERE")


def test_show_begins_with_the_file_and_its_name(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Two\nlines\x1b[31m")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert main(["model", "show", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == ["file\tm.gguf", "name\tTwo lines [31m", "architecture\tllama"]


def test_show_on_a_terminal_takes_a_name_that_looks_like_markup(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("[/bold] [red]x")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    monkeypatch.setattr("sys.stdout", screen := Terminal())
    assert main(["model", "show", str(path)]) == 0
    assert "[/bold] [red]x" in screen.getvalue()


def test_progress_is_a_bar_on_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with download.progress_bar("small") as progress:
        progress("download", 50, 100)
        progress("download", 100, 100)
        progress("unpack", 100, 100)
    assert "download small" in screen.getvalue()
    assert "unpack small" in screen.getvalue()


def test_progress_is_one_line_elsewhere(capsys):
    with download.progress_bar("small") as progress:
        for done in range(10):
            progress("download", done * 10**6, 93 * 10**6)
    assert capsys.readouterr() == ("", "caravan: fetching small (93 MB)\n")


def test_nothing_is_shown_when_nothing_is_fetched(monkeypatch):
    monkeypatch.setattr("sys.stderr", screen := Terminal())
    with download.progress_bar("small"):
        pass
    assert screen.getvalue() == ""


def test_show_sums_up_all_files_of_a_model(smollm2, tmp_path, capsys):
    files = split_model(smollm2, tmp_path / "m", 2)
    assert main(["model", "show", str(files[1])]) == 0
    shown = dict(line.split("\t") for line in capsys.readouterr().out.splitlines())
    assert shown["file"] == "m-00001-of-00002.gguf and 1 more"
    assert (shown["tensors"], shown["parameters"]) == ("272", "134.52 M")
    assert shown["path"] == str(files[0])
    assert main(["model", "show", "--json", str(files[1])]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["files"], found["size"]) == (2, sum(path.stat().st_size for path in files))
    files[0].unlink()
    assert main(["model", "show", str(files[1])]) == 1
    assert "m-00001-of-00002.gguf" in capsys.readouterr().err
