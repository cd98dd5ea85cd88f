"""Our devices under another binding: `caravan.register`, then plain `llama_cpp.Llama`.

Each program is a process of its own: a process has one llama.cpp library, and that cannot forget
the devices that were registered there.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import caravan
from caravan.engine.library import ENVIRONMENT
from interop.peers import CppServer

HERE = Path(__file__).parent
BOUND = 100.0
PROMPT = "The capital of France is"

# what a program finds: its arguments, and how to load a model and let it say something
PRELUDE = """
import os, signal, sys, threading
import caravan
MODEL, *ENDPOINTS = sys.argv[1:]

def load(**options):
    import llama_cpp
    options = {"n_ctx": 256, "n_threads": 1, "n_gpu_layers": -1, "verbose": False, **options}
    return llama_cpp.Llama(model_path=MODEL, **options)

def say(llm, n=4, text="The capital of France is"):
    return llm(text, max_tokens=n, temperature=0.0)["choices"][0]["text"]

def attempt(call, *args, **options):
    try:
        call(*args, **options)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
    else:
        print("done")
"""


def command(source: str, model: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-c", PRELUDE + dedent(source), str(model), *arguments]


def run(source: str, model: Path, *arguments: str, **variables: str) -> list[str]:
    """The lines that a program prints; it must end by itself, with nothing on stderr of ours."""
    done = subprocess.run(
        command(source, model, *arguments),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert done.returncode == 0, done.stderr
    assert "ctypes callback" not in done.stderr
    assert "caravan/backend" not in done.stderr
    return done.stdout.splitlines()


@pytest.fixture(scope="module")
def workers(folder: Path) -> Iterator[list[str]]:
    """Three workers with the kernels of llama-cpp-python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENVIRONMENT, str(folder))
        started = caravan.LocalWorkers(3)
    with started:
        yield started.endpoints


@pytest.fixture
def worker(folder: Path) -> Iterator[caravan.Worker]:
    """One that a test may end."""
    with caravan.Worker("CPU:1") as started:
        yield started


# numbers


def observe(smollm2: Path, out: Path, *endpoints: str) -> tuple[dict[str, np.ndarray], str]:
    done = subprocess.run(
        [sys.executable, str(HERE / "guest.py"), str(smollm2), str(out), *endpoints],
        capture_output=True,
        text=True,
        timeout=BOUND,
    )
    assert done.returncode == 0, done.stderr
    with np.load(out) as found:
        return dict(found), done.stderr


@pytest.fixture(scope="module")
def alone(
    folder: Path, smollm2: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, np.ndarray]:
    """What llama.cpp answers without us."""
    found, log = observe(smollm2, tmp_path_factory.mktemp("alone") / "found.npz")
    assert "RPC" not in log
    assert found["logits"].any()
    return found


def check_equal(found: dict[str, np.ndarray], alone: dict[str, np.ndarray]) -> None:
    assert found.keys() == alone.keys()
    for name, expected in alone.items():
        assert np.array_equal(found[name], expected), name


def test_a_worker_that_asks_for_a_token(folder, smollm2, tmp_path):
    (tmp_path / "token").write_text("a token of 24 characters")
    source = """
        import llama_cpp
        attempt(caravan.register, ENDPOINTS)
        with caravan.register(ENDPOINTS, token="a token of 24 characters") as registration:
            print([device.name for device in registration.devices])
        os.environ["CARAVAN_TOKEN"] = "a token of 24 characters"
        caravan.register(ENDPOINTS).close()
    """
    with caravan.Worker("CPU:1", options=("--token-file", str(tmp_path / "token"))) as worker:
        refusal, names = run(source, smollm2, worker.endpoint)
    assert refusal.startswith("AuthenticationError: the worker at 127.0.0.1:")
    assert names == "['RPC0']"


@pytest.mark.parametrize("count", [1, 2, 3])
def test_workers_answer_what_llama_cpp_answers_alone(workers, alone, smollm2, tmp_path, count):
    found, log = observe(smollm2, tmp_path / "found.npz", *workers[:count])
    check_equal(found, alone)
    # llama.cpp's own word for it: the devices are asynchronous, and there are several
    assert ("pipeline parallelism enabled" in log) == (count > 1)
    for number in range(count):
        assert f"RPC{number}[{workers[number]}] model buffer" in log.replace(
            f"RPC0[{workers[number]}]", f"RPC{number}[{workers[number]}]"
        )


def test_llama_cpps_own_servers_answer_the_same(alone, smollm2, tmp_path):
    with CppServer() as one, CppServer() as other:
        found, _ = observe(smollm2, tmp_path / "found.npz", one.endpoint, other.endpoint)
    check_equal(found, alone)


def test_a_worker_with_another_engine_goes_along(folder, worker, smollm2):
    """Its kernels are those of another release, so nothing is said about the last digit."""
    (text,) = run(
        """
        import llama_cpp
        caravan.register(ENDPOINTS)
        print(say(load()).strip()[:6])
        """,
        smollm2,
        worker.endpoint,
    )
    assert text == "Paris."


@pytest.mark.parametrize("of_binding", [True, False])
@pytest.mark.parametrize(("binding", "api"), [("llama_cpp", 2), ("xllamacpp", 3)])
def test_both_layouts_are_checked_against_the_real_libraries(
    folder, smollm2, binding, api, of_binding
):
    """Of a binding, and as an engine of our own."""
    lines = run(
        f"""
        import importlib
        from caravan import engine
        from caravan.engine import verify
        checked = []
        check = verify.check
        verify.check = lambda found: (checked.append(found), check(found))
        if {of_binding}:
            importlib.import_module({binding!r})
        loaded = engine.adopt() if {of_binding} else engine.load()
        print(loaded.api_version, checked == [loaded], loaded.guest)
        """,
        smollm2,
        **({} if of_binding else {ENVIRONMENT: str(folder if api == 2 else xllamacpp(folder))}),
    )
    assert lines == [f"{api} True {of_binding}"]


def xllamacpp(folder: Path) -> Path:
    return folder.parent.parent / "xllamacpp"


def test_the_example_of_the_documentation_runs(folder, workers, smollm2):
    page = (HERE.parent.parent / "docs" / "python.md").read_text(encoding="utf-8")
    source, shown = re.search(
        r"^```py\n(.*?)^```$\n*^```text\n(.*?)^```$", page, re.M | re.S
    ).groups()
    source = source.replace('"lab1:50052", "lab2:50052"', "*ENDPOINTS[:2]")
    lines = run(source.replace('"model.gguf"', "MODEL"), smollm2, *workers)
    assert lines == shown.splitlines()


# names, and who else is there


def test_names_go_on_and_an_endpoint_comes_once(folder, workers, smollm2):
    lines = run(
        """
        import llama_cpp
        first = caravan.register(ENDPOINTS[:2])
        attempt(caravan.register, ENDPOINTS[1:])
        second = caravan.register([ENDPOINTS[2], "local:CPU:1"])
        third = caravan.register(["local:CPU:1"])
        print([device.name for one in (first, second, third) for device in one.devices])
        print(repr(first) == f"<Registration of {ENDPOINTS[0]}, {ENDPOINTS[1]}: 2 devices>")
        print(second.endpoints[0] == ENDPOINTS[2], first.cluster.devices == first.devices)
        llm = load()
        say(llm)
        for one in (first, second, third):
            print([all(device.allocated().values()) for device in one.devices])
            one.check()
        print(sorted(first.stats()), first.stats()["RPC1"].graphs > 0)
        """,
        smollm2,
        *workers,
    )
    assert lines == [
        f"UsageError: {workers[1]} is registered already: close that registration first",
        "['RPC0', 'RPC1', 'RPC2', 'local:CPU:1', 'local:CPU:1#2']",
        "True",
        "True True",
        "[True, True]",
        "[True, True]",
        "[True]",
        "['RPC0', 'RPC1'] True",
    ]


def test_llama_cpps_own_rpc_devices_work_beside(folder, workers, smollm2):
    with CppServer() as server:
        lines = run(
            """
            import ctypes, llama_cpp
            *endpoints, server, folder = ENDPOINTS
            rpc, ggml = (ctypes.CDLL(f"{folder}/lib{n}.so.0") for n in ("ggml-rpc", "ggml"))
            rpc.ggml_backend_rpc_add_server.restype = ctypes.c_void_p
            registry = rpc.ggml_backend_rpc_add_server(server.encode())
            ggml.ggml_backend_register(ctypes.c_void_p(registry))
            with caravan.register(endpoints) as registered:
                print([device.name for device in registered.devices])
                llm = load()
                print(say(llm).strip()[:6])
                print([device.allocated()["weights"] > 0 for device in registered.devices])
                llm.close()
            # their server alone
            print(say(load()).strip()[:6])
            """,
            smollm2,
            workers[0],
            server.endpoint,
            str(folder),
        )
    assert lines == ["['RPC1']", "Paris.", "[True]", "Paris."]


def test_a_cluster_of_ours_is_not_in_their_list(folder, workers, smollm2):
    """It may come before and after, and is numbered by itself."""
    lines = run(
        """
        import llama_cpp
        with caravan.connect(ENDPOINTS[:1]) as before:
            registered = caravan.register(ENDPOINTS[1:2])
            with caravan.connect(ENDPOINTS[2:]) as after:
                clusters = [before, registered, after]
                print([device.name for one in clusters for device in one.devices])
                llm = load()
                print([one.devices[0].allocated()["weights"] > 0 for one in clusters])
                with caravan.Model(MODEL, devices=[*before.devices, *after.devices]) as model:
                    with caravan.Context(model, caravan.ContextParams(n_ctx=64)) as context:
                        print("".join(caravan.generate(context, "The capital of France is",
                            max_tokens=2, sampling=caravan.SamplingParams(temp=0))))
                print(say(llm).strip()[:6])
        """,
        smollm2,
        *workers,
    )
    assert lines == ["['RPC0', 'RPC0', 'RPC0']", "[False, True, False]", " Paris.", "Paris."]


@pytest.mark.parametrize("first", [False, True], ids=["register alone", "connect before"])
def test_the_log_of_the_binding_stays_where_it_goes(folder, workers, smollm2, first):
    lines = run(
        f"""
        import llama_cpp
        seen = []
        log = llama_cpp.llama_log_callback(lambda level, text, data: seen.append(text))
        llama_cpp.llama_log_set(log, None)
        if {first}:
            caravan.connect(ENDPOINTS[1:2]).close()
        caravan.register(ENDPOINTS[:1])
        load(verbose=True).close()
        print(any(b"RPC0" in line for line in seen))
        llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, None)
        """,
        smollm2,
        *workers,
    )
    assert lines == ["True"]


def test_more_devices_than_the_engine_can_use_are_refused(folder, smollm2):
    """With more the engine would end the process. What was registered before stays."""
    with caravan.Worker(",".join(["CPU:1"] * 9)) as one, caravan.Worker("CPU:1,CPU:1") as other:
        lines = run(
            """
            import llama_cpp
            first = caravan.register(ENDPOINTS[:1])
            attempt(caravan.register, [ENDPOINTS[1], *["local:CPU:1"] * 5])
            first.close()
            # what is closed takes no room
            second = caravan.register(ENDPOINTS)
            print(len(second.devices), second.devices[-1].name)
            say(load())
            """,
            smollm2,
            one.endpoint,
            other.endpoint,
        )
    assert lines == [
        "UsageError: 7 devices are more than the 6 that the engine can use",
        "11 RPC19",
    ]


# ends


def test_a_lost_worker_fails_all_that_comes_until_its_registration_is_closed(
    folder, worker, workers, smollm2
):
    program = subprocess.Popen(
        command(
            """
            import llama_cpp
            registered = caravan.register(ENDPOINTS)
            llm = load()
            say(llm)
            print("ready", flush=True)
            input()
            attempt(say, llm)
            attempt(say, llm)
            thread = threading.Thread(target=attempt, args=(say, llm, 4, "Something else"))
            thread.start()
            thread.join()
            attempt(load)
            attempt(load, tensor_split=[1, 0])
            attempt(load, n_gpu_layers=0)
            attempt(registered.check)
            registered.close()
            attempt(say, llm)
            llm.close()
            llm = load()
            print(say(llm).strip()[:6])
            again = caravan.register(ENDPOINTS[:1])
            print([device.name for device in again.devices])
            other = load()
            print(say(other).strip()[:6], again.devices[0].allocated()["weights"] > 0)
            """,
            smollm2,
            workers[0],
            worker.endpoint,
        ),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    endpoint = worker.endpoint
    with program:
        assert program.stdout is not None
        assert program.stdout.readline() == "ready\n"
        worker.close()
        out, _ = program.communicate("go on\n", timeout=BOUND)
    refused = "ValueError: Failed to create llama_context"
    lost = f"WorkerLost: lost RPC1 at {endpoint}"
    # the cause is told better as soon as the worker was asked for it
    first, *lines = [
        lost if line.startswith(f"{lost} during ") else line for line in out.splitlines()
    ]
    assert first == lost
    assert lines == [
        lost,
        lost,
        f"ValueError: Failed to load model from file: {smollm2}",
        refused,
        refused,
        lost,
        f"WorkerLost: lost RPC0 at {workers[0]} during use: the stream was closed",
        "Paris.",
        "['RPC2']",
        "Paris. True",
    ]
    assert program.returncode == 0


def test_zeros_of_a_lost_worker_are_no_embedding(folder, worker, smollm2):
    """It is lost when the numbers are due, and C cannot be told that none will come."""
    (line,) = run(
        """
        import llama_cpp
        from caravan.stream.ext_link import ExtLink
        registered = caravan.register(ENDPOINTS)
        llm = load(embedding=True)
        get = ExtLink.get_tensor
        def late(link, *args):
            ticket = get(link, *args)
            link.stream.fail(caravan.CaravanError("gone"), "GET")
            return ticket
        ExtLink.get_tensor = late
        attempt(llm.embed, "Nobody looked back.")
        """,
        smollm2,
        worker.endpoint,
    )
    assert line == f"WorkerLost: lost RPC0 at {worker.endpoint} during GET: gone"


@pytest.mark.parametrize("holder", ["program", "module", "caravan", "nobody"])
def test_the_interpreter_ends_whoever_frees_the_models(folder, workers, smollm2, holder):
    """Also when nothing of ours works any more."""
    source = f"""
        import llama_cpp, json
        caravan.register(ENDPOINTS[:2])
        llm = load()
        say(llm)
        holder = {holder!r}
        if holder == "module":
            json.kept = llm
            del llm
        elif holder == "caravan":
            caravan.kept = llm
            del llm
        elif holder == "nobody":
            import ctypes
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(llm))
        """
    assert run(source, smollm2, *workers) == []


def test_the_workers_are_taken_leave_of_at_the_end(folder, workers, smollm2):
    lines = run(
        """
        import llama_cpp
        from caravan.stream.ext_link import ExtLink
        leave = ExtLink.bye
        ExtLink.bye = lambda link: (print("bye", flush=True), leave(link))[1]
        caravan.register(ENDPOINTS[:2])
        llm = load()
        say(llm)
        """,
        smollm2,
        *workers,
    )
    assert lines == ["bye", "bye"]


def test_a_forked_child_that_ends_leaves_the_workers_to_its_parent(folder, workers, smollm2):
    lines = run(
        """
        import llama_cpp
        registration = caravan.register(ENDPOINTS[:2])
        llm = load()
        child = os.fork()
        if not child:
            sys.exit()
        os.waitpid(child, 0)
        print(say(llm).strip()[:6])
        registration.check()
        """,
        smollm2,
        *workers,
    )
    assert lines == ["Paris."]


# Ctrl-C


def test_ctrl_c_ends_a_generation_and_the_workers_stay(folder, workers, smollm2):
    program = subprocess.Popen(
        command(
            """
            import llama_cpp
            signal.signal(signal.SIGINT, signal.default_int_handler)
            registered = caravan.register(ENDPOINTS[:2])
            llm = load(n_ctx=1024)
            expected = say(llm, 8)
            for _ in range(2):
                try:
                    for _ in llm("Once upon a time", max_tokens=900, stream=True):
                        print("token", flush=True)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
            registered.check()
            print(say(llm, 8) == expected)
            registered.close()
            print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
            """,
            smollm2,
            *workers,
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    with program:
        assert program.stdout is not None
        for _ in range(2):
            assert program.stdout.readline() == "token\n"
            program.send_signal(signal.SIGINT)
            assert next(line for line in program.stdout if line != "token\n") == "interrupted\n"
        out, _ = program.communicate(timeout=BOUND)
    assert out.splitlines() == ["True", "True"]
    assert program.returncode == 0


def test_ctrl_c_inside_of_every_callback(folder, workers, smollm2):
    """While a model is loaded, read and computed with: each time it is the caller who is told."""
    lines = run(
        """
        import llama_cpp
        from caravan.stream.ext_link import ExtLink
        signal.signal(signal.SIGINT, signal.default_int_handler)
        registered = caravan.register(ENDPOINTS[:2])
        llm = load()
        expected = say(llm, 8)
        # llama_cpp's own callback swallows what Ctrl-C raises there
        llama_cpp.llama_log_set(llama_cpp.llama_log_callback(0), None)

        def interrupted(verb, call):
            function = getattr(ExtLink, verb)
            def pressed(*args, **options):
                setattr(ExtLink, verb, function)
                os.kill(os.getpid(), signal.SIGINT)
                return function(*args, **options)
            setattr(ExtLink, verb, pressed)
            try:
                call()
            except KeyboardInterrupt:
                print(verb)

        interrupted("alloc", load)
        interrupted("set_tensor", load)
        interrupted("graph_compute", lambda: say(llm))
        interrupted("get_tensor", lambda: say(llm))
        interrupted("get_tensor", llm.save_state)
        registered.check()
        print(say(llm, 8) == expected)
        """,
        smollm2,
        *workers,
    )
    verbs = ["alloc", "set_tensor", "graph_compute", "get_tensor", "get_tensor"]
    assert lines == [*verbs, "True"]


# what is refused


def test_a_binding_must_have_been_imported(folder, workers, smollm2):
    told = (
        "UsageError: no binding has loaded a llama.cpp library in this process: import it first, as"
        " in `import llama_cpp`"
    )
    lines = run("attempt(caravan.register, ENDPOINTS)", smollm2, *workers)
    assert lines == [told]
    # an engine of our own is nobody else's
    source = """
        with caravan.connect(ENDPOINTS[:1]):
            attempt(caravan.register, ENDPOINTS[1:])
        """
    assert run(source, smollm2, *workers) == [told]


def test_two_libraries_are_refused(folder, workers, smollm2):
    (line,) = run(
        """
        from caravan import engine
        engine.load()
        import llama_cpp
        attempt(caravan.register, ENDPOINTS)
        """,
        smollm2,
        *workers,
    )
    assert line.startswith("UsageError: ")
    assert "libllama.so" in line
    assert "xllamacpp" in line
    assert "register there before Caravan does anything else" in line


def test_the_environment_must_not_name_another_library(folder, workers, smollm2):
    source = """
        import llama_cpp
        attempt(caravan.register, ENDPOINTS[:1])
        """
    for wrong in (str(folder.parent / "nowhere"), str(xllamacpp(folder))):
        (line,) = run(source, smollm2, *workers, **{ENVIRONMENT: wrong})
        assert line.startswith(f"UsageError: {ENVIRONMENT}={wrong} is not the library that this")
        assert line.endswith("libllama.so: unset it")
    assert run(source, smollm2, *workers, **{ENVIRONMENT: str(folder)}) == ["done"]


def test_the_environment_may_name_it_for_a_cluster_too(folder, workers, smollm2):
    """A binding loads the one name of a library, Caravan by itself the other."""
    source = """
        import llama_cpp
        with caravan.connect(ENDPOINTS[:1]):
            attempt(caravan.register, ENDPOINTS[1:2])
        """
    assert run(source, smollm2, *workers, **{ENVIRONMENT: str(folder)}) == ["done"]


def test_a_library_of_another_version_is_refused(folder, workers, smollm2):
    """What is wrong is found before anything is entered there, and the binding works on."""
    lines = run(
        """
        import ctypes, llama_cpp
        llama_cpp.llama_backend_init()
        find = llama_cpp.llama_cpp._lib
        find.ggml_backend_reg_by_name.restype = ctypes.c_void_p
        version = ctypes.c_int.from_address(find.ggml_backend_reg_by_name(b"CPU"))
        true, version.value = version.value, 4
        attempt(caravan.register, ENDPOINTS)
        version.value = 3
        attempt(caravan.register, ENDPOINTS)
        version.value = true
        print(true, find.ggml_backend_dev_count(), say(load()).strip()[:6])
        """,
        smollm2,
        *workers,
    )
    assert lines[0] == (
        "AbiMismatch: the engine has ggml backend API version 4; this version of Caravan knows 2"
        " and 3"
    )
    assert lines[1].startswith("AbiMismatch: the engine at ")
    assert lines[2:] == ["2 1 Paris."]


def test_no_worker_is_no_registration(folder, workers, smollm2):
    lines = run(
        """
        import llama_cpp
        attempt(caravan.register, ["127.0.0.1:1"])
        attempt(caravan.register, [])
        attempt(caravan.register, ENDPOINTS[:1], poll=101)
        print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        print(say(load()).strip()[:6])
        """,
        smollm2,
        *workers,
    )
    assert lines == [
        "ConnectError: cannot connect to 127.0.0.1:1: connection refused",
        "UsageError: no worker given: expected HOST:PORT",
        "UsageError: polling level 101 is not in 0...100",
        "True",
        "Paris.",
    ]


# xllamacpp


def test_xllamacpp_lists_the_devices(folder, workers, smollm2):
    lines = run(
        """
        import xllamacpp
        registered = caravan.register(ENDPOINTS[:2])
        print([device["name"] for device in xllamacpp.get_device_info()])
        """,
        smollm2,
        *workers,
    )
    assert lines == ["['CPU', 'RPC0', 'RPC1']"]
