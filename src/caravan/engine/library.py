"""Finding and loading the engine: the library that has ggml and llama in it.

Loaded once a process, by path, never through a binding's own import. The registry that we add to
must be the one that llama sees: what is already mapped is used again, and a build of several files
is loaded by the names that its parts ask for.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caravan.engine import layouts, log, verify
from caravan.engine.ggml import Ggml
from caravan.engine.llama import Llama
from caravan.errors import AbiMismatch, EngineNotFound

ENVIRONMENT = "CARAVAN_LIBRARY"
_WHEEL = "xllamacpp"
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
# in the order in which they depend on each other
_PARTS = ("ggml-base", "ggml-cpu", "ggml", "llama")
_RPC_VERSIONS = {"0.25": (7, 0, 0), "0.26": (8, 0, 0)}


class Engine:
    """The loaded library.

    Attributes:
        ggml, llama: their functions.
        find: any exported function by its C name; raises EngineNotFound when there is none.
        version, commit: ggml's.
        api_version: ggml's backend API version.
        layouts: the plug-in structs of that version.
        rpc_version: the RPC protocol that llama.cpp has with this ggml.
        path: the file, or the folder of the files.
    """

    def __init__(self, libraries: list[ctypes.CDLL], path: Path) -> None:
        self._libraries = libraries
        self.path = path
        self.ggml = Ggml(self.find)
        self.version: str = self.ggml.version().decode()
        self.commit: str = self.ggml.commit().decode()
        self._load_plugins()
        registry = self.ggml.reg_by_name(b"CPU")
        if not registry:
            raise EngineNotFound(f"the engine at {path} has no CPU backend")
        self.api_version: int = ctypes.c_int.from_address(registry).value
        self.layouts = layouts.for_api(self.api_version)
        self.ggml.use(self.layouts)
        self.llama = Llama(self.find, self.api_version)
        log.install(self.llama)
        self.llama.backend_init()
        minor = ".".join(self.version.split(".")[:2])
        self.rpc_version = _RPC_VERSIONS.get(minor) or (7 if self.api_version < 3 else 8, 0, 0)

    def __repr__(self) -> str:
        return f"<Engine ggml {self.version}, API {self.api_version}, at {self.path}>"

    def find(self, symbol: str) -> Any:
        for library in self._libraries:
            try:
                return library[symbol]
            except AttributeError:
                continue
        raise EngineNotFound(f"the engine at {self.path} does not export {symbol}")

    def _load_plugins(self) -> None:
        """Builds with backends as files of their own keep them beside the library."""
        if not self.ggml.reg_by_name(b"CPU") and self.path.is_dir():
            self.ggml.backend_load_all_from_path(os.fsencode(self.path))


@dataclass(frozen=True, slots=True)
class _Candidate:
    files: list[Path]
    path: Path


def _candidates() -> list[_Candidate]:
    """Where to look, best first; raises EngineNotFound when CARAVAN_LIBRARY names nothing."""
    wanted = os.environ.get(ENVIRONMENT)
    if wanted:
        found = _in_path(Path(wanted))
        if found is None:
            raise EngineNotFound(
                f"{ENVIRONMENT}={wanted}: no libllama{_SUFFIX} and libggml{_SUFFIX} there, nor a"
                " single library with both"
            )
        return [found]
    mapped = _mapped()
    if mapped is not None:
        return [mapped]
    wheel = _wheel()
    if wheel is not None:
        return [wheel]
    raise EngineNotFound(
        f"no engine: the {_WHEEL} wheel is not installed (pip install {_WHEEL}), and"
        f" {ENVIRONMENT} does not name a llama.cpp build"
    )


def _in_path(path: Path) -> _Candidate | None:
    if path.is_file():
        return _Candidate([path], path)
    for folder in (path, path / "bin", path / "lib"):
        parts = [_part(folder, name) for name in _PARTS]
        if parts[0] and parts[2] and parts[3]:
            return _Candidate([part for part in parts if part], folder)
        single = sorted(folder.glob(f"{_WHEEL}*{_SUFFIX}"))
        if single:
            return _Candidate([single[0]], single[0])
    return None


def _part(folder: Path, name: str) -> Path | None:
    """The file of one part: by the versioned name first, which is what the other parts ask for."""
    for file in (folder / f"lib{name}{_SUFFIX}.0", folder / f"lib{name}{_SUFFIX}"):
        if file.is_file():
            return file
    return None


def _mapped_files() -> list[Path]:
    """The files in this process's memory; none where the system does not tell."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line))


def _mapped() -> _Candidate | None:
    """The engine that this process has loaded already, if it has one."""
    files = _mapped_files()
    single = [f for f in files if f.name.startswith(f"{_WHEEL}.") and _SUFFIX in f.name]
    if single:
        return _Candidate([single[0]], single[0])
    parts = [f for name in _PARTS for f in files if f.name.split(".")[0] == f"lib{name}"]
    if any(f.name.startswith("libllama.") for f in parts):
        return _Candidate(parts, parts[-1].parent)
    return None


def _check_one_copy(candidate: _Candidate) -> None:
    """Two copies of ggml would have a registry each: the one we add to, and the one llama reads."""
    for file in candidate.files:
        stem = file.name.split(".")[0]
        copies = [f for f in _mapped_files() if f.name.split(".")[0] == stem]
        if len(copies) > 1:
            raise EngineNotFound(f"{stem} is loaded twice: {', '.join(map(str, copies))}")


def _wheel() -> _Candidate | None:
    spec = importlib.util.find_spec(_WHEEL)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        found = _in_path(Path(folder))
        if found is not None:
            return found
    return None


def _open(file: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    except OSError as exc:
        if "libgomp.so.1" not in str(exc):
            raise EngineNotFound(f"cannot load the engine {file}: {exc}") from exc
    from caravan.engine import openmp

    openmp.provide()
    try:
        return ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    except OSError as exc:
        raise EngineNotFound(f"cannot load the engine {file}: {exc}") from exc


_lock = threading.Lock()
_engine: Engine | None = None


def load() -> Engine:
    """The process's engine, loaded and checked at the first call.

    Raises EngineNotFound when there is none, AbiMismatch when it is one that Caravan does not know.
    """
    global _engine
    with _lock:
        if _engine is None:
            candidate = _candidates()[0]
            if ctypes.sizeof(ctypes.c_void_p) != 8:
                raise AbiMismatch("Caravan needs a 64-bit Python")
            engine = Engine([_open(file) for file in candidate.files], candidate.path)
            _check_one_copy(candidate)
            verify.check(engine)
            _engine = engine
        return _engine
