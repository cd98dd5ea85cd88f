"""A model that is not there, on devices that only cost time: it loads, it runs, and stages of it
compute at the same time."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import caravan
from caravan.errors import AllocationError, ModelError, UsageError
from caravan.models.fake import ARCHITECTURES, TYPES, FakeModel
from caravan.stream.ext_link import ExtLink
from e2e.processes import children, command

SMALL = {"layers": 4, "embd": 256, "heads": 4, "kv_heads": 2, "ff": 512, "vocab": 300, "ctx": 512}
FAST = "sim:GFLOPS=1e6,GBPS=1e6"


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small.gguf"
    FakeModel(**SMALL).write(path)
    return path


@pytest.fixture(scope="module")
def worker() -> Iterator[caravan.Worker]:
    with caravan.Worker(f"{FAST},{FAST},CPU:1") as started:
        yield started


@pytest.fixture
def cluster(worker) -> Iterator[caravan.Cluster]:
    with caravan.connect([worker.endpoint]) as connected:
        yield connected


def memory_of(pid: int) -> int:
    """Bytes of memory that a process really has."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) << 10
    return 0


def stored(kind: str, shape: tuple[int, ...]) -> int:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind if len(shape) > 1 else "F32"]]
    count = shape[0] * (shape[1] if len(shape) > 1 else 1)
    return -(-(count // block * size) // 32) * 32


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture_runs_with_its_own_tensors_and_no_others(arch, cluster, tmp_path):
    shape = FakeModel(arch=arch, **SMALL)
    shape.write(tmp_path / "model.gguf")
    sims = cluster.devices[:2]
    with caravan.Model(tmp_path / "model.gguf", devices=sims) as model:
        # the embeddings stay on the head
        wanted = sum(stored("Q4_0", s) for n, s in shape.tensors().items() if "token_embd" not in n)
        assert sum(device.allocated()["weights"] for device in sims) == wanted
        assert model.layer_devices() == ["RPC0"] * 2 + ["RPC1"] * 3
        with caravan.Context(model, caravan.ContextParams(n_ctx=256, n_ubatch=32)) as context:
            context.decode(model.tokenize("A prompt, nothing more: ½."))
            for _ in range(3):
                assert not context.logits().any()
                context.decode([5])
            assert context.n_past > 20


@pytest.mark.parametrize("kind", TYPES)
def test_every_number_format_runs(kind, cluster, tmp_path):
    FakeModel(type=kind, **SMALL).write(tmp_path / "model.gguf")
    with (
        caravan.Model(tmp_path / "model.gguf", devices=cluster.devices[:1]) as model,
        caravan.Context(model, caravan.ContextParams(n_ctx=256)) as context,
    ):
        context.decode([1, 2, 3])
        assert not context.logits().any()


def test_a_model_far_larger_than_memory_takes_next_to_none(tmp_path):
    """70 billion parameters, 38.8 GB, over 8 stages."""
    path = tmp_path / "model.gguf"
    FakeModel().write(path)
    bound = 200 << 20
    with (
        caravan.Worker(",".join(["sim:GFLOPS=1e6,GBPS=1e6"] * 8)) as worker,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        sessions = children(worker.pid)
        before = memory_of("self"), sum(map(memory_of, sessions))
        with (
            caravan.Model(path, devices=cluster.devices) as model,
            caravan.Context(model, caravan.ContextParams(n_ctx=512, n_ubatch=32)) as context,
        ):
            assert model.n_layer == 80 and model.size > 38_000_000_000
            context.decode(list(range(3, 131)))
            context.decode([5])
            assert not context.logits().any()
            after = memory_of("self"), sum(map(memory_of, sessions))
            assert sum(device.allocated()["weights"] for device in cluster.devices) > 38e9
        assert after[0] - before[0] < bound
        assert after[1] - before[1] < bound


def test_two_stages_compute_different_micro_batches_at_the_same_time(small, monkeypatch):
    """The first stage is done with the third micro-batch before the slow second stage is with the
    first. Copies go over the head here, so that it sees them."""
    seen: list[str] = []
    get_tensor = ExtLink.get_tensor

    def noted(link, tensor, offset, size, target):
        ticket = get_tensor(link, tensor, offset, size, target)
        ticket.on_done(lambda: seen.append(link.stream.device))
        return ticket

    monkeypatch.setattr(ExtLink, "get_tensor", noted)
    with (
        caravan.Worker(FAST) as first,
        caravan.Worker(f"{FAST},US=800000") as second,
        caravan.Worker(FAST) as third,
        caravan.connect(
            [worker.endpoint for worker in (first, second, third)], direct_copies=False
        ) as cluster,
        caravan.Model(small, devices=cluster.devices) as model,
        caravan.Context(model, caravan.ContextParams(n_ctx=256, n_ubatch=32)) as context,
    ):
        context.decode(list(range(3, 99)))
        context.synchronize()
    # the last is the read of the logits
    assert seen == [*["RPC0"] * 3, *["RPC1"] * 3, "RPC2"]


def test_a_real_model_runs_on_them_too(cluster, smollm2):
    with (
        caravan.Model(smollm2, devices=cluster.devices[:2]) as model,
        caravan.Context(model, caravan.ContextParams(n_ctx=64)) as context,
    ):
        context.decode(model.tokenize("Hello"))
        assert not context.logits().any()


# refusals


def refused(path: Path, *devices: object, **params: object) -> str:
    with pytest.raises(ModelError) as caught:
        caravan.Model(path, caravan.ModelParams(**params), devices=devices)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_refused_wherever_something_would_be_computed(small, cluster):
    one, two, cpu = cluster.devices
    assert "has no weights and runs only on simulated devices" in refused(small)
    assert refused(small).endswith("here is none")
    assert "RPC2" in refused(small, cpu) and "is a real one" in refused(small, one, cpu)
    assert "only 2 of its 5 layers would be on one" in refused(small, one, n_gpu_layers=2)
    assert "here is none" in refused(small, one, split_mode="none", main_gpu=-1)
    assert "'blk.1'" in refused(small, one, two, overrides=(("blk.1", "CPU"),))


def test_its_vocabulary_can_be_had_without_devices(small):
    with caravan.Model(small, caravan.ModelParams(vocab_only=True)) as model:
        assert model.n_vocab == 300
        assert b"".join(map(model.piece, model.tokenize("né"))) == "▁né".encode()


def test_a_head_that_speaks_llama_cpps_protocol_does_not_know_them(small, worker):
    with caravan.connect([worker.endpoint], extension=False) as cluster:
        assert "is a real one" in refused(small, *cluster.devices[:2])


def test_a_device_whose_memory_is_too_small_says_so(small):
    with (
        caravan.Worker("sim:GFLOPS=1,GBPS=1,GIB=0.001") as worker,
        caravan.connect([worker.endpoint]) as cluster,
        pytest.raises(ModelError, match="sim: no room for a buffer of") as caught,
    ):
        caravan.Model(small, devices=cluster.devices, fit=False)
    assert isinstance(caught.value.__cause__, AllocationError)


def test_more_devices_than_the_engine_can_use_are_refused(small):
    """It would end the process. Fifteen beside the CPU are in order."""
    with (
        caravan.Worker(",".join([FAST] * 16)) as worker,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        with pytest.raises(UsageError, match="16 devices are more than the 15 that the engine"):
            caravan.Model(small, devices=cluster.devices)
        FakeModel(**{**SMALL, "layers": 20}).write(small.with_name("deep.gguf"))
        with (
            caravan.Model(small.with_name("deep.gguf"), devices=cluster.devices[:15]) as model,
            caravan.Context(model, caravan.ContextParams(n_ctx=256)) as context,
        ):
            assert len(set(model.layer_devices())) == 15
            context.decode([1, 2, 3])
            assert not context.logits().any()


def test_a_cut_header_is_refused(small, cluster, tmp_path):
    path = tmp_path / "cut.gguf"
    path.write_bytes(small.read_bytes()[:5000])
    assert "its header does not end within its 5000 bytes" in refused(path, cluster.devices[0])


def test_loading_leaves_the_devices_as_they_were(small, cluster):
    sim = cluster.devices[0]
    for params in (caravan.ModelParams(), caravan.ModelParams(n_gpu_layers=5)):
        caravan.Model(small, params, devices=[sim]).close()
    with pytest.raises(ModelError, match="stopped"):
        caravan.Model(small, devices=[sim], progress=lambda fraction: False)
    assert not sim.loaders
    assert not caravan.engine.load().ggml.buft_is_host(sim.buffer_type)
    with pytest.raises(UsageError):
        FakeModel(layers=0)


# commands


def ran(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=50)


def test_the_commands_work_with_it(worker, tmp_path):
    path = str(tmp_path / "model.gguf")
    made = ran("model", "fake", "--layers", "4", "--embd", "256", "--heads", "4", "--kv-heads",
               "2", "--ff", "512", "--vocab", "300", "--type", "q8_0", "-o", path)  # fmt: skip
    assert (made.returncode, made.stdout) == (0, f"{path}\n"), made.stderr
    shown = json.loads(ran("model", "show", path, "--json").stdout)
    assert (shown["layers"], shown["file_type"], shown["fake"]) == (4, "Q8_0", True)
    where = ("-m", path, "--rpc", worker.endpoint, "-dev", "RPC0/RPC1")
    bench = ran("bench", *where, "-p", "64", "-n", "2", "-ub", "32", "-r", "1", "-o", "json")
    assert bench.returncode == 0, bench.stderr
    assert [(row["n_prompt"], row["n_gen"]) for row in json.loads(bench.stdout)] == [
        (64, 0),
        (0, 2),
    ]
    text = ran("run", *where, "-p", "Hello", "-n", "3", "--temp", "0")
    assert text.returncode == 0, text.stderr
    for refusal in (ran("bench", "-m", path), ran("run", "-m", path, "-p", "x", "-dev", "none")):
        assert refusal.returncode == 1
        assert "runs only on simulated devices" in refusal.stderr
        assert refusal.stdout == ""
    again = ran("model", "fake", "-o", path)
    assert again.returncode == 1 and "--force overwrites it" in again.stderr
    wrong = ran("model", "fake", "--heads", "7", "-o", str(tmp_path / "other.gguf"))
    assert wrong.returncode in (1, 2) and "not a multiple" in wrong.stderr
    assert not (tmp_path / "other.gguf").exists()
