"""Builds llama.cpp's own RPC client and server, as peers for the tests, and installs them.

    python tests/interop/build.py

The package llama-cpp-python from its source, with RPC, into the environment of the Python that
runs this. The build takes about four minutes on two cores; its wheel is kept in
CARAVAN_INTEROP_CACHE, else in the user's cache directory, for the next time. Without a C++ compiler
nothing is built, which is said loudly, and is an error if CARAVAN_INTEROP is `required`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from peers import libraries

PACKAGE, VERSION = "llama-cpp-python", "0.3.36"
# Without GGML_NATIVE=OFF some virtual machines, which announce AMX, trap on it.
CMAKE_ARGS = "-DGGML_RPC=ON -DGGML_NATIVE=OFF"


def main() -> None:
    # a package of that version may be there without RPC
    if _installed(PACKAGE) != VERSION or libraries() is None:
        wheel = _cached() or _build()
        if wheel is None:
            return
        _pip("install", "--quiet", "--force-reinstall", "--no-deps", str(wheel))
    # what it needs besides, also when that was broken off the last time
    _pip("install", "--quiet", f"{PACKAGE}=={VERSION}")


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _folder() -> Path:
    given = os.environ.get("CARAVAN_INTEROP_CACHE")
    if given:
        return Path(given)
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "caravan-interop"


def _cached() -> Path | None:
    name = PACKAGE.replace("-", "_")
    found = sorted(_folder().glob(f"{name}-{VERSION}-*{platform.machine()}.whl"))
    return found[-1] if found else None


def _build() -> Path | None:
    if not _has_compiler():
        required = os.environ.get("CARAVAN_INTEROP") == "required"
        _say_loudly(
            "no C++ compiler: llama.cpp's client and server cannot be built,",
            f"and the tests with them (tests/interop) {'FAIL' if required else 'are SKIPPED'}.",
            "`apt install g++` or the like, and run this again.",
        )
        if required:
            sys.exit(1)
        return None
    folder = _folder()
    folder.mkdir(parents=True, exist_ok=True)
    print(f"building {PACKAGE} {VERSION} with RPC, once, for {folder}: minutes", flush=True)
    # beside its place, so that a build that was broken off or a second one at the same time leaves
    # no half a wheel there
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as made:
        _pip(
            *("wheel", "--quiet", "--no-deps", "--no-cache-dir", "--no-binary", PACKAGE),
            *(f"{PACKAGE}=={VERSION}", "--wheel-dir", made),
            CMAKE_ARGS=CMAKE_ARGS,
            CMAKE_BUILD_PARALLEL_LEVEL=str(os.cpu_count() or 1),
        )
        (wheel,) = Path(made).glob("*.whl")
        return Path(shutil.move(wheel, folder / wheel.name))


def _has_compiler() -> bool:
    named = os.environ.get("CXX", "").split()[:1]
    return any(map(shutil.which, named or ("c++", "g++", "clang++")))


def _pip(*arguments: str, **variables: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments],
        env={**os.environ, **variables},
        check=True,
    )


def _say_loudly(*lines: str) -> None:
    rule = "!" * 79
    print(rule, *(f"!! {line}" for line in lines), rule, sep="\n", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
