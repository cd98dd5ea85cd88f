"""What a model and a context take of the workers' memory is known before, to the byte.

What does not fit is refused before anything is sent, with what fits instead.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

import caravan
from caravan import engine as caravan_engine
from caravan.errors import ContextError, DoesNotFit, ModelError
from caravan.llm import Context, ContextParams, Model, ModelParams
from caravan.llm.params import USUAL_CTX
from caravan.models.fake import ARCHITECTURES, FakeModel
from e2e import shapes
from e2e.processes import caravan as command

MIB = 1 << 20
# what SmolLM2 takes of two devices with this: 120 and 223 MiB
CONTEXT = ContextParams(n_ctx=4096)


@contextmanager
def limited(limits: str, devices: str = "CPU:1,CPU:1") -> Iterator[caravan.Cluster]:
    with (
        caravan.Worker(devices, options=("--max-memory", limits)) as worker,
        caravan.connect([worker.endpoint]) as cluster,
    ):
        yield cluster


@pytest.fixture(scope="module")
def cluster() -> Iterator[caravan.Cluster]:
    with (
        caravan.Worker("CPU:1,CPU:1,CPU:1") as worker,
        caravan.connect([worker.endpoint]) as connected,
    ):
        yield connected


def taken(device) -> tuple[int, int, int]:
    sizes = device.allocated()
    return sizes["weights"], sizes["kv"], sizes["compute"]


def needed(need) -> tuple[int, int, int]:
    return need.weights, need.kv, need.compute


def assert_as_planned(model: Model) -> None:
    assert model.needs is not None
    for device, need in zip(model.devices, model.needs.devices, strict=True):
        assert needed(need) == taken(device), device


# to the byte


@pytest.mark.parametrize(
    ("params", "context"),
    [
        (ModelParams(), ContextParams(n_ctx=2048)),
        (ModelParams(), ContextParams(n_ctx=0)),
        (ModelParams(), ContextParams(n_ctx=100)),
        (ModelParams(tensor_split=(1, 1, 29)), ContextParams(n_ctx=1024, n_ubatch=64)),
        (ModelParams(tensor_split=(20, 0, 11)), ContextParams(n_ctx=1024, flash_attn="off")),
        (ModelParams(tensor_split=(0, 30, 1)), ContextParams(n_ctx=1024)),
        (ModelParams(n_gpu_layers=10), ContextParams(n_ctx=1024)),
        (ModelParams(n_gpu_layers=0), ContextParams(n_ctx=1024)),
        (ModelParams(split_mode="none", main_gpu=1), ContextParams(n_ctx=1024)),
        (ModelParams(overrides=((r"blk\.\d+\.ffn", "CPU"),)), ContextParams(n_ctx=1024)),
        (ModelParams(), ContextParams(n_ctx=2048, type_k="q8_0", type_v="q8_0")),
        (ModelParams(), ContextParams(n_ctx=1024, n_seq_max=3)),
        (ModelParams(), ContextParams(n_ctx=1024, embeddings=True, n_batch=256)),
    ],
)
def test_what_is_planned_is_what_is_taken(params, context, cluster, smollm2):
    with (
        Model(smollm2, params, devices=cluster.devices, context=context) as model,
        Context(model, context),
    ):
        assert_as_planned(model)


def test_a_cache_on_the_cpu_is_planned_well_enough(cluster, smollm2):
    context = ContextParams(n_ctx=1024, offload_kqv=False)
    with Model(smollm2, devices=cluster.devices, context=context) as model, Context(model, context):
        assert model.needs is not None
        assert model.needs.host.kv == 23040 * 1024
        for device, need in zip(model.devices, model.needs.devices, strict=True):
            weights, kv, compute = taken(device)
            assert (need.weights, need.kv, kv) == (weights, 0, 0)
            assert abs(need.compute - compute) < max(0.02 * compute, 2 * MIB)


def test_what_stays_here_is_counted_too(cluster, smollm2):
    with Model(smollm2, ModelParams(n_gpu_layers=10), devices=cluster.devices) as model:
        assert model.needs is not None
        weights = sum(need.weights for need in model.needs.devices)
        # the embeddings are here and, as the output's weights, on the last device
        assert model.size < weights + model.needs.host.weights < model.size + 31 * MIB
        assert model.needs.context.n_ctx == USUAL_CTX
        assert model.needs.host.kv == 21 * 768 * USUAL_CTX


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_big_model_is_planned_to_the_byte(arch, tmp_path):
    path = tmp_path / "big.gguf"
    FakeModel(arch=arch, ctx=32768).write(path)
    context = ContextParams(n_ctx=16384, n_ubatch=256, type_k="q8_0", type_v="q8_0")
    sim = "sim:GFLOPS=1e6,GBPS=1e6,GIB=24"
    with (
        caravan.Worker(f"{sim},{sim}") as worker,
        caravan.connect([worker.endpoint]) as cluster,
        Model(path, devices=cluster.devices, context=context) as model,
        Context(model, context),
    ):
        assert_as_planned(model)


@pytest.mark.parametrize("make", [shapes.mamba, shapes.experts, shapes.windows])
@pytest.mark.parametrize(
    "context",
    [
        ContextParams(n_ctx=2048),
        ContextParams(n_ctx=2048, n_seq_max=4, swa_full=False, n_ubatch=128),
    ],
)
def test_other_kinds_of_models_are_planned_to_the_byte(make, context, tmp_path):
    path = tmp_path / "other.gguf"
    make(path)
    sim = "sim:GFLOPS=1e6,GBPS=1e6,GIB=1"
    with (
        caravan.Worker(f"{sim},{sim}") as worker,
        caravan.connect([worker.endpoint]) as cluster,
        Model(path, devices=cluster.devices, context=context) as model,
        Context(model, context),
    ):
        assert_as_planned(model)


def test_a_file_that_does_not_say_how_many_tokens_there_are_is_planned_too(tmp_path):
    path = tmp_path / "silent.gguf"
    FakeModel(layers=4, embd=256, heads=4, kv_heads=2, ff=512, vocab=300, ctx=512).write(path)
    path.write_bytes(path.read_bytes().replace(b"llama.vocab_size", b"llama.vocab_none"))
    context = ContextParams(n_ctx=512)
    with (
        caravan.Worker("sim:GFLOPS=1e6,GBPS=1e6,GIB=1") as worker,
        caravan.connect([worker.endpoint]) as cluster,
        Model(path, devices=cluster.devices, context=context) as model,
        Context(model, context),
    ):
        assert model.n_vocab == 300
        assert_as_planned(model)


def test_the_state_of_a_recurrent_model_is_no_longer_there_after_planning(tmp_path):
    shapes.mamba(tmp_path / "mamba.gguf")
    with limited("4MiB", "sim:GFLOPS=1e6,GBPS=1e6,GIB=1") as cluster:
        with pytest.raises(DoesNotFit, match="RPC0"):
            Model(tmp_path / "mamba.gguf", devices=cluster.devices, context=ContextParams(n_ctx=64))
        assert cluster.devices[0].memory() == (4 * MIB, 4 * MIB)
        assert taken(cluster.devices[0]) == (0, 0, 0)


def test_planning_leaves_nothing_behind(cluster, smollm2):
    before = [(device.memory(), taken(device)) for device in cluster.devices]
    sent = sum(device.link.stream.bytes_sent for device in cluster.devices)
    with pytest.raises(ModelError):
        Model(
            smollm2,
            devices=cluster.devices,
            on_needs=lambda needs: (_ for _ in ()).throw(ModelError("seen")),
        )
    assert sum(device.link.stream.bytes_sent for device in cluster.devices) - sent < 4096
    assert [taken(device) for device in cluster.devices] == [sizes for _, sizes in before]


# the default split


def test_equal_devices_get_equal_layers(cluster, smollm2):
    with Model(smollm2, devices=cluster.devices[:2], context=CONTEXT) as model:
        assert model.shares == [15, 16]


@pytest.mark.parametrize(
    ("limits", "moved"),
    [
        ("250MiB,250MiB", False),
        # the output layer and its computing leave less room on the second device
        ("200MiB,200MiB", True),
        ("220MiB,180MiB", True),
        ("180MiB,250MiB", True),
    ],
)
def test_the_default_split_is_one_that_fits(limits, moved, smollm2):
    with (
        limited(limits) as cluster,
        Model(smollm2, devices=cluster.devices, context=CONTEXT) as model,
        Context(model, CONTEXT) as context,
    ):
        assert (model.shares != [15, 16]) == moved
        assert model.needs is not None
        assert model.needs.fits
        assert model.needs.pipeline
        assert_as_planned(model)
        context.decode(model.tokenize("one two three"))
        assert len(context.logits()) == model.n_vocab


def test_where_the_pipeline_has_no_room_devices_take_turns(smollm2):
    with (
        limited("180MiB,165MiB") as cluster,
        Model(smollm2, devices=cluster.devices, context=CONTEXT) as model,
        Context(model, CONTEXT) as context,
    ):
        assert model.needs is not None
        assert not model.needs.pipeline
        context.decode(model.tokenize("one two three"))
        context.synchronize()
        for device, need in zip(model.devices, model.needs.devices, strict=True):
            assert sum(taken(device)) <= need.need <= need.free


# refused


@pytest.mark.parametrize(
    ("limits", "params", "words"),
    [
        ("150MiB", ModelParams(), ["-c", "-ctk", "-ub", "-ngl"]),
        ("250MiB", ModelParams(tensor_split=(1, 30)), ["-ts", "-c", "-ctk", "-ub"]),
        # neither is enough alone
        ("60MiB,90MiB", ModelParams(), ["-ub", "-c"]),
        ("10MiB", ModelParams(), []),
    ],
)
def test_what_does_not_fit_is_refused_and_what_is_suggested_fits(limits, params, words, smollm2):
    with limited(limits) as cluster:
        sent = sum(device.link.stream.bytes_sent for device in cluster.devices)
        with pytest.raises(DoesNotFit) as caught:
            Model(smollm2, params, devices=cluster.devices, context=CONTEXT)
        # no more than the questions for free memory
        assert sum(device.link.stream.bytes_sent for device in cluster.devices) - sent < 4096
        assert all(taken(device) == (0, 0, 0) for device in cluster.devices)
        error = caught.value
        assert isinstance(error, ModelError)
        assert "\n" not in str(error)
        lacking = [need for need in error.needs.devices if need.lacks]
        for need in lacking:
            assert f"{need.where} lacks" in str(error)
            assert need.endpoint in cluster.endpoints
        assert lacking
        for word in words:
            assert word in str(error)
        assert bool(error.suggestions) == bool(words)
        for suggestion in error.suggestions:
            with (
                Model(
                    smollm2,
                    suggestion.params,
                    devices=cluster.devices,
                    context=suggestion.context,
                ) as model,
                Context(model, suggestion.context) as context,
            ):
                context.decode(model.tokenize("one two three"))
                context.synchronize()


def test_a_suggested_split_is_one_of_whole_layers(smollm2):
    sim = "sim:GFLOPS=1e6,GBPS=1e6,GIB=24"
    # too uneven for the default to be in whole layers: the first device gets one nevertheless
    with limited("100MiB,20GiB", f"{sim},{sim}") as cluster:
        with pytest.raises(DoesNotFit, match=r"the split 1/30 \(-ts\)") as caught:
            Model(
                smollm2, ModelParams(tensor_split=(30, 1)), devices=cluster.devices, context=CONTEXT
            )
        suggestion = caught.value.suggestions[0]
        assert suggestion.params.tensor_split == (1, 30)
        with (
            Model(
                smollm2, suggestion.params, devices=cluster.devices, context=suggestion.context
            ) as model,
            Context(model, suggestion.context),
        ):
            assert_as_planned(model)


def test_a_suggested_split_may_leave_a_device_out(smollm2):
    halves = ModelParams(tensor_split=(1, 1))
    with (
        limited("20MiB,1GiB") as cluster,
        pytest.raises(DoesNotFit, match=r"the split 0/31 \(-ts\)"),
    ):
        Model(smollm2, halves, devices=cluster.devices, context=CONTEXT)


def test_a_shorter_context_is_suggested_where_a_device_is_left_out(smollm2):
    with limited("20MiB,1GiB") as cluster:
        asked = ContextParams(n_ctx=100_000)
        with pytest.raises(DoesNotFit, match="-c") as caught:
            Model(smollm2, devices=cluster.devices, context=asked)
        best = caught.value.suggestions[0].context
        assert 20_000 < best.n_ctx < 100_000
        with Model(smollm2, devices=cluster.devices, context=best) as model:
            assert model.shares == [0, 31]


def test_the_suggested_context_is_about_the_longest_that_fits(smollm2):
    with limited("110MiB", "CPU:1") as cluster:
        asked = ContextParams(n_ctx=8192, n_ubatch=32)
        with pytest.raises(DoesNotFit) as caught:
            Model(smollm2, devices=cluster.devices, context=asked)
        best = caught.value.suggestions[0].context
        assert best.n_ctx >= 256
        longer = replace(best, n_ctx=best.n_ctx + 512)
        with pytest.raises(DoesNotFit):
            Model(smollm2, devices=cluster.devices, context=longer)


def test_without_a_planned_context_only_weights_are_refused(smollm2):
    with limited("100MiB", "CPU:1") as cluster:
        small = ContextParams(n_ctx=256, n_batch=16, n_ubatch=16)
        with Model(smollm2, devices=cluster.devices) as model:
            assert model.needs is not None
            assert not model.needs.fits
            with pytest.raises(DoesNotFit, match=r"no context of 4096 tokens: .* lacks"):
                Context(model, CONTEXT)
            assert isinstance(DoesNotFit(""), ContextError)
            with pytest.raises(ContextError, match="--max-memory"):
                Context(model, replace(small, n_ubatch=512, n_batch=512))
            with pytest.raises(ContextError, match=r"lacks|--max-memory"):
                Context(model, small)
    with limited("90MiB", "CPU:1") as cluster, pytest.raises(DoesNotFit, match="weights"):
        Model(smollm2, devices=cluster.devices)


def test_contexts_beside_each_other_are_counted(smollm2):
    """KV 90 MiB each: beside the weights there is room for one, and most of another."""
    with (
        limited("370MiB", "CPU:1") as cluster,
        Model(smollm2, devices=cluster.devices, context=CONTEXT) as model,
    ):
        with Context(model, CONTEXT):
            with pytest.raises(
                DoesNotFit, match="no context of 4096 tokens: it does not fit: RPC0"
            ):
                Context(model, CONTEXT)
            with pytest.raises(ContextError):
                Context(model, replace(CONTEXT, n_ctx=3072))
        with Context(model, CONTEXT):
            pass


def test_what_another_model_holds_is_not_free(smollm2):
    with limited("300MiB", "CPU:1") as cluster:
        with Model(smollm2, devices=cluster.devices, context=CONTEXT):
            with pytest.raises(DoesNotFit) as caught:
                Model(smollm2, devices=cluster.devices, context=CONTEXT)
            (need,) = caught.value.needs.devices
            assert need.free == need.total - sum(taken(cluster.devices[0]))
        # and is at once when the other one is closed
        Model(smollm2, devices=cluster.devices, context=CONTEXT).close()


def test_a_context_that_would_end_this_process_is_refused_beforehand(cluster, smollm2):
    with pytest.raises(DoesNotFit, match="no context of 2000000000 tokens: not enough memory here"):
        Model(smollm2, devices=cluster.devices, context=ContextParams(n_ctx=2_000_000_000))


def test_without_fit_the_devices_refuse(smollm2):
    with (
        limited("60MiB", "CPU:1") as cluster,
        pytest.raises(ModelError, match="--max-memory") as caught,
    ):
        Model(smollm2, devices=cluster.devices, context=CONTEXT, fit=False)
    assert not isinstance(caught.value, DoesNotFit)


# the commands


def run(*words: str) -> tuple[int, str, str]:
    done = command("run", "-p", "One", "-n", "4", "--temp", "0", *words)
    return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="module")
def narrow() -> Iterator[str]:
    with caravan.Worker("CPU:1", options=("--max-memory", "150MiB")) as worker:
        yield worker.endpoint


def test_run_shows_what_it_takes(smollm2):
    with caravan.Worker("CPU:1", options=("--max-memory", "1GiB")) as worker:
        code, _, told = run("-m", str(smollm2), "--rpc", worker.endpoint, "-c", "512")
        first = told.splitlines()[0]
        assert code == 0
        assert first.startswith("caravan: RPC0 needs 204 MiB: weights 92.1, KV 11.2, compute ")
        assert first.endswith("; free 1.0 GiB")
        assert len(first) <= 80
        code, _, told = run("-m", str(smollm2), "--rpc", worker.endpoint, "-c", "512", "--quiet")
        assert code == 0
        assert "weights 92.1," not in told


def test_run_says_which_device_gets_nothing(smollm2):
    with caravan.Worker("CPU:1,CPU:1", options=("--max-memory", "20MiB,1GiB")) as worker:
        options = ("--rpc", worker.endpoint, "-c", "512", "--split=memory")
        code, _, told = run("-m", str(smollm2), *options)
    assert code == 0
    assert told.splitlines()[0] == "caravan: RPC0 gets no layers; free 20.0 MiB"


def test_run_and_bench_refuse_in_one_line(narrow, smollm2):
    code, out, told = run("-m", str(smollm2), "--rpc", narrow, "-c", "4096")
    assert (code, out) == (1, "")
    assert re.match(
        rf"caravan: error: {re.escape(smollm2.name)} does not fit: RPC0 at {narrow} lacks"
        r" [\d.]+ MiB of [\d.]+ MiB \(weights 92.1, KV cache 90.0, compute [\d.]+\)\."
        r" It would fit with \d+ layers on the devices \(-ngl\)\n$",
        told,
    )
    assert len(told.splitlines()) == 1
    done = command("bench", "-m", str(smollm2), "--rpc", narrow, "-p", "4096", "-r", "1")
    assert done.returncode == 1
    assert "lacks" in done.stderr
    code, _, told = run("-m", str(smollm2), "--rpc", narrow, "-c", "4096", "--fit", "off")
    assert code == 1
    assert "--max-memory" in told


def test_run_plans_for_what_the_model_was_made_for_where_nothing_bounds_the_answer(smollm2):
    with caravan.Worker("CPU:1", options=("--max-memory", "200MiB")) as worker:
        done = command("run", "-p", "One", "-m", str(smollm2), "--rpc", worker.endpoint)
    assert done.returncode == 1
    # 8192 tokens
    assert "KV cache 180," in done.stderr


def test_the_engines_log_is_that_of_the_load_alone(cluster, smollm2, capsys):
    caravan_engine.set_verbose(True)
    try:
        Model(smollm2, devices=cluster.devices).close()
    finally:
        caravan_engine.set_verbose(False)
    log = capsys.readouterr().err
    assert len(re.findall(r"no_alloc +=", log)) == 1
    assert "compute buffer size" not in log
