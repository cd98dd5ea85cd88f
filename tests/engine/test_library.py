"""Finding the engine: what is searched in which order, and what is said when nothing is there."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from caravan import engine
from caravan.engine import library
from caravan.errors import EngineNotFound, UsageError

MAPPED = library._mapped_files()


@pytest.fixture
def unloaded(monkeypatch):
    """As in a process that has not loaded the engine yet."""
    monkeypatch.setattr(library, "_engine", None)
    monkeypatch.setattr(library, "_mapped_files", list)
    monkeypatch.delenv(library.ENVIRONMENT, raising=False)
    return monkeypatch


@pytest.mark.skipif(library.ENVIRONMENT in os.environ, reason="another engine is under test")
def test_wheel_is_found_without_importing_it():
    assert engine.load().path.name.startswith("xllamacpp.")
    assert "xllamacpp" not in sys.modules


def test_load_gives_one_engine_to_all_threads():
    found = []
    threads = [threading.Thread(target=lambda: found.append(engine.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(map(id, found)) == {id(engine.load())}


@pytest.mark.skipif(library.ENVIRONMENT in os.environ, reason="another engine is under test")
def test_engine_says_what_it_is():
    loaded = engine.load()
    assert loaded.api_version == 3
    assert loaded.rpc_version == (8, 0, 0)
    assert loaded.version.startswith("0.26.")
    assert repr(loaded) == f"<Engine ggml {loaded.version}, API 3, at {loaded.path}>"


def test_find_raises_for_a_function_that_is_not_there():
    with pytest.raises(EngineNotFound, match="does not export llama_nonsense"):
        engine.load().find("llama_nonsense")


def test_thin_calls_raise_attribute_error_for_names_they_lack():
    with pytest.raises(AttributeError, match="no thin call 'nonsense'"):
        engine.load().ggml.nonsense()
    with pytest.raises(AttributeError, match="no thin call 'nonsense'"):
        engine.load().llama.nonsense()


def test_mapped_engine_is_used_again(unloaded):
    engine_file = Path("/somewhere/xllamacpp.abi3.so")
    unloaded.setattr(library, "_mapped_files", lambda: [Path("/lib/libc.so.6"), engine_file])
    assert library._candidates()[0].files == [engine_file]


def test_mapped_build_of_several_files_is_used_in_order_of_dependence(unloaded):
    names = ["libllama.so.0.5", "libggml.so.0", "libggml-base.so.0.25.3", "libggml-cpu.so.0"]
    unloaded.setattr(library, "_mapped_files", lambda: [Path("/b", name) for name in names])
    found = [file.name.split(".")[0] for file in library._candidates()[0].files]
    assert found == ["libggml-base", "libggml-cpu", "libggml", "libllama"]


def test_environment_wins_over_what_is_mapped(unloaded, tmp_path):
    unloaded.setattr(library, "_mapped_files", lambda: [Path("/b/xllamacpp.abi3.so")])
    for part in ("ggml-base", "ggml", "llama"):
        for suffix in ("", ".0"):
            (tmp_path / f"lib{part}.so{suffix}").touch()
    unloaded.setattr(library, "_SUFFIX", ".so")
    unloaded.setenv(library.ENVIRONMENT, str(tmp_path))
    (found,) = library._candidates()
    # the names with a number are those that the parts ask for; the others may be copies
    assert [f.name for f in found.files] == ["libggml-base.so.0", "libggml.so.0", "libllama.so.0"]


def test_environment_that_names_nothing_is_an_error(unloaded, tmp_path):
    unloaded.setenv(library.ENVIRONMENT, str(tmp_path / "nowhere"))
    with pytest.raises(EngineNotFound, match=r"CARAVAN_LIBRARY=.*nowhere: no libllama"):
        engine.load()


def test_environment_that_names_no_library_is_an_error(unloaded, tmp_path):
    nonsense = tmp_path / "libllama.so"
    nonsense.write_text("nonsense")
    unloaded.setenv(library.ENVIRONMENT, str(nonsense))
    with pytest.raises(EngineNotFound, match=r"cannot load the engine .*libllama.so"):
        engine.load()


@pytest.mark.skipif(sys.platform != "linux", reason="names a Linux library")
def test_environment_that_names_another_library_is_an_error(unloaded):
    file = next(f for f in MAPPED if f.name.startswith("libc.so") or f.name.startswith("libc-"))
    unloaded.setenv(library.ENVIRONMENT, str(file))
    with pytest.raises(EngineNotFound, match=r"libc.* does not export ggml"):
        engine.load()


def test_no_engine_at_all_says_what_to_do(unloaded):
    unloaded.setattr(library, "_wheel", lambda: None)
    with pytest.raises(EngineNotFound, match=r"pip install xllamacpp.*CARAVAN_LIBRARY"):
        engine.load()


def test_two_copies_of_a_library_are_refused(unloaded):
    copies = [Path("/b/libggml.so"), Path("/b/libggml.so.0")]
    unloaded.setattr(library, "_mapped_files", lambda: copies)
    with pytest.raises(EngineNotFound, match=r"libggml is loaded twice: /b/libggml.so, "):
        library._check_one_copy(library._Candidate([copies[1]], Path("/b")))


# the library of a binding


def test_a_binding_is_found_by_the_file_that_has_llama(unloaded):
    files = [Path("/b/libggml.so.0"), Path("/b/libllama.so"), Path("/b/libggml-base.so.0")]
    unloaded.setattr(library, "_mapped_files", lambda: files)
    found = library._binding()
    assert (found.files, found.path) == ([Path("/b/libllama.so")], Path("/b"))
    unloaded.setattr(library, "_mapped_files", lambda: [Path("/b/xllamacpp.abi3.so")])
    assert library._binding().path == Path("/b/xllamacpp.abi3.so")


def test_no_binding_is_an_error_that_says_what_to_do(unloaded):
    with pytest.raises(UsageError, match="import it first, as in `import llama_cpp`"):
        engine.adopt()


def test_a_system_that_does_not_tell_is_an_error(unloaded, tmp_path):
    unloaded.setattr(library, "_MAPS", tmp_path / "none")
    with pytest.raises(UsageError, match="this system has none"):
        engine.adopt()


def test_several_bindings_are_an_error_that_names_them(unloaded):
    files = [Path("/b/libllama.so"), Path("/c/xllamacpp.abi3.so")]
    unloaded.setattr(library, "_mapped_files", lambda: files)
    with pytest.raises(UsageError, match=r"/b/libllama.so and /c/xllamacpp.abi3.so are loaded"):
        engine.adopt()


def test_the_environment_may_name_the_binding_and_nothing_else(unloaded, tmp_path):
    for part in ("ggml-base", "ggml", "llama"):
        (tmp_path / f"lib{part}.so").touch()
        (tmp_path / f"lib{part}.so.0").touch()
    unloaded.setattr(library, "_SUFFIX", ".so")
    unloaded.setattr(library, "_mapped_files", lambda: [tmp_path / "libllama.so"])
    unloaded.setenv(library.ENVIRONMENT, str(tmp_path))
    assert library._binding().path == tmp_path
    unloaded.setattr(library, "_mapped_files", lambda: [Path("/b/libllama.so")])
    with pytest.raises(UsageError, match=r"CARAVAN_LIBRARY=.* has loaded, /b/libllama.so: unset"):
        engine.adopt()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_names_of_an_engine_are_not_for_other_libraries():
    """A llama.cpp library that is loaded later would be bound to ours, in part."""
    script = """
import ctypes
from caravan import engine
assert engine.load().find("ggml_backend_register")
print(hasattr(ctypes.CDLL(None), "ggml_backend_register"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_xllamacpp_is_adopted_as_it_is():
    """Checked as our own engine is, API 3; its log is not taken over."""
    script = """
import ctypes, xllamacpp
lines = []
def note(level, text, data):
    lines.append(text)
library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(note)
library.llama_log_set(log, None)
from caravan import engine
adopted = engine.adopt()
assert engine.load() is adopted is engine.adopt()
adopted.find("ggml_log_internal")(4, b"still here", None)
print(adopted.guest, adopted.api_version, lines)
library.llama_log_set(None, None)
"""
    env = {key: value for key, value in os.environ.items() if key != library.ENVIRONMENT}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert (done.stdout, done.stderr) == ("True 3 [b'still here']\n", "")
