"""Finding and loading the engine: the library that has ggml and llama in it.

Loaded once a process, by path, never through a binding's own import. The registry that we add to
must be the one that llama sees: what is already mapped is used again, and a build of several files
is loaded by the names that its parts ask for. `load` gives an engine of our own, `adopt` that of a
binding, as a guest who changes nothing there.
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
from caravan.errors import AbiMismatch, EngineNotFound, UsageError

ENVIRONMENT = "CARAVAN_LIBRARY"
_WHEEL = "xllamacpp"
_SUFFIX = {"darwin": ".dylib", "win32": ".dll"}.get(sys.platform, ".so")
# in the order in which they depend on each other
_PARTS = ("ggml-base", "ggml-cpu", "ggml", "llama")
_MAPS = Path("/proc/self/maps")
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
        guest: whether it is a binding's, which has its own log and its own backends.
    """

    def __init__(self, libraries: list[ctypes.CDLL], path: Path, guest: bool = False) -> None:
        self._libraries = libraries
        self.path = path
        self.guest = guest
        self.ggml = Ggml(self.find)
        self.version: str = self.ggml.version().decode()
        self.commit: str = self.ggml.commit().decode()
        if not guest:
            self._load_plugins()
        registry = self.ggml.reg_by_name(b"CPU")
        if not registry:
            raise EngineNotFound(f"the engine at {path} has no CPU backend")
        self.api_version: int = ctypes.c_int.from_address(registry).value
        self.layouts = layouts.for_api(self.api_version)
        self.ggml.use(self.layouts)
        self.llama = Llama(self.find, self.api_version)
        if not guest:
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
        mapped = _mapped()
        # of one build there may be copies under several names
        same = mapped is not None and _folder(mapped.path) == _folder(found.path)
        return [mapped if mapped is not None and same else found]
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
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    return list(dict.fromkeys(Path(line.split(maxsplit=5)[5]) for line in lines if "/" in line))


def _mapped() -> _Candidate | None:
    """The engine that this process has loaded already, if it has one."""
    files = _mapped_files()
    single = [f for f in files if _is_single(f)]
    if single:
        return _Candidate([single[0]], single[0])
    parts = [f for name in _PARTS for f in files if f.name.split(".")[0] == f"lib{name}"]
    if any(f.name.startswith("libllama.") for f in parts):
        return _Candidate(parts, parts[-1].parent)
    return None


def _is_single(file: Path) -> bool:
    return file.name.startswith(f"{_WHEEL}.") and _SUFFIX in file.name


def _binding() -> _Candidate:
    """The llama.cpp library of a binding in this process, as the one file that has llama in it.

    Raises UsageError if it is not clear which that is.
    """
    if not _MAPS.exists():
        raise UsageError(f"the library of a binding is looked for in {_MAPS}: this system has none")
    found = [f for f in _mapped_files() if _is_single(f) or f.name.startswith("libllama.")]
    ours = _engine.path if _engine is not None and _brought else None
    if _WHEEL not in sys.modules and all(ours in (file, file.parent) for file in found):
        raise UsageError(
            "no binding has loaded a llama.cpp library in this process: import it first, as in"
            " `import llama_cpp`"
        )
    if len(found) > 1:
        also = f" (Caravan itself uses {ours})" if ours else ""
        raise UsageError(
            f"{' and '.join(map(str, found))} are loaded in this process{also}: use a process that"
            " loads one llama.cpp library, and register there before Caravan does anything else"
        )
    (file,) = found
    candidate = _Candidate([file], file if _is_single(file) else file.parent)
    _check_environment(candidate)
    return candidate


def _check_environment(candidate: _Candidate) -> None:
    """CARAVAN_LIBRARY does not say where a binding's library is, but must not contradict."""
    wanted = os.environ.get(ENVIRONMENT)
    named = _in_path(Path(wanted)) if wanted else candidate
    # of one build there may be copies under several names
    if named is None or _folder(named.path) != _folder(candidate.path):
        raise UsageError(
            f"{ENVIRONMENT}={wanted} is not the library that this process has loaded,"
            f" {candidate.files[0]}: unset it"
        )


def _folder(path: Path) -> Path:
    return (path.parent if path.is_file() else path).resolve()


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
        return ctypes.CDLL(str(file))
    except OSError as exc:
        if "libgomp.so.1" not in str(exc):
            raise EngineNotFound(f"cannot load the engine {file}: {exc}") from exc
    from caravan.engine import openmp

    openmp.provide()
    try:
        return ctypes.CDLL(str(file))
    except OSError as exc:
        raise EngineNotFound(f"cannot load the engine {file}: {exc}") from exc


def _open_mapped(file: Path) -> ctypes.CDLL:
    """What is in the process already, without making its names visible to others."""
    return ctypes.CDLL(str(file), mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_NOLOAD)


def _check_linked(engine: Engine) -> None:
    """What llama calls must be what we find through it: another copy of ggml whose names are global
    would come first for llama, with a registry of its own."""
    try:
        visible = ctypes.CDLL(None).ggml_backend_register
    except AttributeError:
        return
    own = engine.find("ggml_backend_register")
    if ctypes.cast(visible, ctypes.c_void_p).value != ctypes.cast(own, ctypes.c_void_p).value:
        raise UsageError(
            f"another copy of ggml than that of {engine.path} is loaded for all of this process:"
            " use a process that loads one only"
        )


_lock = threading.Lock()
_engine: Engine | None = None
# whether `load` has brought it into the process
_brought = False


def load() -> Engine:
    """The process's engine, loaded and checked at the first call.

    Raises EngineNotFound when there is none, AbiMismatch when it is one that Caravan does not know.
    """
    global _engine, _brought
    with _lock:
        if _engine is None:
            candidate = _candidates()[0]
            _check_word()
            _brought = _mapped() is None
            # what is there already is a binding's, and so is its log
            files = [_open(file) for file in candidate.files]
            engine = Engine(files, candidate.path, guest=not _brought)
            _check_one_copy(candidate)
            verify.check(engine)
            _engine = engine
        return _engine


def adopt() -> Engine:
    """The engine of the binding that has loaded one in this process, checked at the first call.

    Nothing of the binding's is changed: its log stays where it goes. `load` gives the same from
    then on.

    Raises UsageError when no library is loaded, or several are, or CARAVAN_LIBRARY names another;
    AbiMismatch when it is one that Caravan does not know.
    """
    global _engine
    with _lock:
        candidate = _binding()
        if _engine is None:
            _check_word()
            engine = Engine(list(map(_open_mapped, candidate.files)), candidate.path, guest=True)
            _check_linked(engine)
            verify.check(engine)
            _engine = engine
        return _engine


def _check_word() -> None:
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise AbiMismatch("Caravan needs a 64-bit Python")
