"""The stand-in for a missing libgomp: renamed rightly, loaded, or refused with what to install."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from caravan.engine import openmp
from caravan.errors import DownloadError, EngineNotFound

linux = pytest.mark.skipif(sys.platform != "linux", reason="ELF is Linux's format")


def any_library() -> Path:
    """Some ELF library with a long name, mapped into this very process."""
    import numpy  # noqa: F401  # brings its own libraries along

    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition(" ")[2]
        if ".libs/" in name and ".so" in name:
            return Path(name)
    pytest.skip("no bundled library is loaded")


@linux
def test_renamed_library_is_found_by_its_new_name(tmp_path):
    copy = tmp_path / "renamed.so"
    copy.write_bytes(openmp.rename_library(any_library().read_bytes(), "libnew.so.9"))
    # A library that is loaded is found by its name alone, which no search path has.
    script = (
        "import ctypes, sys\n"
        "ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)\n"
        "ctypes.CDLL('libnew.so.9')"
    )
    libs = str(any_library().parent)
    done = subprocess.run(
        [sys.executable, "-c", script, str(copy)],
        capture_output=True,
        text=True,
        env={"LD_LIBRARY_PATH": libs},
    )
    assert done.returncode == 0, done.stderr


@linux
def test_rename_changes_nothing_but_the_name():
    image = any_library().read_bytes()
    renamed = openmp.rename_library(image, "lib.so.1")
    assert len(renamed) == len(image)
    changed = [at for at in range(len(image)) if image[at] != renamed[at]]
    assert 0 < changed[-1] - changed[0] < 64


@linux
def test_rename_refuses_a_longer_name():
    with pytest.raises(ValueError, match="no room"):
        openmp.rename_library(any_library().read_bytes(), "x" * 300)


@pytest.mark.parametrize("image", [b"", b"MZ" + bytes(100), b"\x7fELF\x01\x01" + bytes(100)])
def test_rename_refuses_other_files(image):
    with pytest.raises(ValueError, match="not a 64-bit"):
        openmp.rename_library(image, "lib.so")


@pytest.fixture
def x86_linux(tmp_path, monkeypatch):
    monkeypatch.setenv("CARAVAN_CACHE", str(tmp_path))
    monkeypatch.setattr(openmp.sys, "platform", "linux")
    monkeypatch.setattr(openmp.platform, "machine", lambda: "x86_64")
    return tmp_path / "lib"


def test_nothing_to_be_had_says_what_to_install(x86_linux, monkeypatch, capsys):
    def offline(*args):
        raise DownloadError("cannot fetch libgomp: no network")

    monkeypatch.setattr(openmp, "fetch", offline)
    with pytest.raises(EngineNotFound, match=r"libgomp\.so\.1, which this machine lacks: cannot"):
        openmp.provide()


def test_other_platforms_are_told_to_install(monkeypatch):
    monkeypatch.setattr(openmp.platform, "machine", lambda: "riscv64")
    with pytest.raises(EngineNotFound, match="apt install libgomp1"):
        openmp.provide()


@linux
def test_provide_loads_the_copy_and_fetches_once(x86_linux, monkeypatch, capsys):
    fetched = []

    def fetch(asset, directory):
        fetched.append(asset.name)
        directory.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(any_library(), directory / "carried.so"))

    loaded = []
    monkeypatch.setattr(openmp, "fetch", fetch)
    monkeypatch.setattr(openmp.ctypes, "CDLL", lambda path, mode: loaded.append((path, mode)))
    ours = str(x86_linux / "libgomp.so.1")
    assert str(openmp.provide()) == ours
    assert str(openmp.provide()) == ours
    assert fetched == ["libgomp"]
    assert loaded == [(ours, ctypes.RTLD_GLOBAL)] * 2
    assert "caravan: fetching libgomp.so.1" in capsys.readouterr().err
