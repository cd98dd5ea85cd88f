"""What a model takes, layer by layer: checked against the model's shape, and against its splits."""

from __future__ import annotations

import numpy as np
import pytest

from caravan.engine.layouts import OP_NAMES
from caravan.llm import ContextParams, ModelParams
from caravan.llm.rehearsal import Rehearsal, Step
from caravan.models.fake import FakeModel
from caravan.models.ledger import known_header
from caravan.plan.profile import DeviceProfile
from caravan.plan.work import ModelWork, layers_of
from caravan.wire.records import EXT_TENSOR
from caravan.worker.cost import nanoseconds
from caravan.worker.speed import Speed
from caravan.worker.table import Table
from e2e import shapes

EMBD, FF, VOCAB, KV_EMBD, LAYERS = 256, 512, 640, 128, 5
SHAPE = FakeModel("llama", LAYERS, EMBD, 4, 2, FF, VOCAB, 4096, "F16")
MATRICES = 2 * EMBD * EMBD + 2 * EMBD * KV_EMBD + 3 * EMBD * FF
CONTEXT = ContextParams(n_ctx=1024, n_ubatch=128)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models")
    found = {}
    for arch in ("llama", "qwen2", "qwen3"):
        found[arch] = directory / f"{arch}.gguf"
        FakeModel(arch, LAYERS, EMBD, 4, 2, FF, VOCAB, 4096, "F16").write(found[arch])
    for name in ("mamba", "experts", "windows"):
        found[name] = directory / f"{name}.gguf"
        getattr(shapes, name)(found[name])
    return found


@pytest.fixture(scope="module")
def work(files):
    return ModelWork.of(files["llama"], ModelParams(), CONTEXT, sizes=(48, 999), sequences=(1, 3))


def test_there_is_a_point_for_every_size_and_length(work):
    tokens, kv = {8, 32, 48, 128}, {256, 1024}
    assert [(p.n_tokens, p.n_kv) for p in work.prompt] == [
        (n, length) for n in sorted(tokens) for length in sorted(kv)
    ]
    assert [(p.n_tokens, p.n_kv) for p in work.decode] == [
        (n, length) for n in (1, 3) for length in (256, 1024)
    ]
    for point in (*work.prompt, *work.decode):
        assert len(point.layers) == point.graph.n_nodes
        assert (np.diff(point.layers) >= 0).all()
        rows, nodes = point.graph.rows, point.graph.rows[: point.graph.n_nodes]
        attention = nodes[nodes["op"] == OP_NAMES.index("FLASH_ATTN_EXT")]
        assert (rows["ne"][attention["src"][:, 1], 1] == point.n_kv).all()
        assert len(attention) == LAYERS


def test_multiply_adds_are_those_of_the_shape(work):
    layer = work.layer_work(1, 256, "decode")
    attention = 2 * EMBD * 256
    for one in layer[:-1]:
        assert one.multiply_adds == pytest.approx(MATRICES + attention, rel=0.02)
    assert layer[-1].multiply_adds == pytest.approx(EMBD * VOCAB, rel=0.02)
    prompt = work.layer_work(128, 1024)
    assert prompt[1].multiply_adds == pytest.approx(128 * (MATRICES + 2 * EMBD * 1024), rel=0.02)
    # cut short behind the attention
    assert prompt[-2].multiply_adds < 0.7 * prompt[1].multiply_adds
    assert prompt[-1].multiply_adds == 0


def test_weights_are_those_of_the_file(work, files):
    sizes = {name: span.size for name, span in known_header(files["llama"]).tensors.items()}
    for number, weights in enumerate(work.weights[:-1]):
        assert weights == sum(
            size for name, size in sizes.items() if name.startswith(f"blk.{number}.")
        )
    assert work.weights[-1] == sizes["output.weight"] + sizes["output_norm.weight"]
    assert all(one.moved > one.weights for one in work.layer_work(1, 256, "decode"))


def test_layers_alike_are_one_class(work):
    # the first one looks at the embeddings, the last one is cut short
    assert work.classes == (0, 1, 1, 1, 2, 3)
    assert len(set(work.signatures)) == 4


def test_signatures_tell_models_apart_and_know_them_again(work, files, tmp_path):
    again = ModelWork.of(files["llama"], ModelParams(), CONTEXT, sizes=(48,), sequences=(1, 3))
    assert again.signatures == work.signatures
    other = tmp_path / "other.gguf"
    FakeModel("llama", LAYERS, EMBD, 4, 2, FF + 32, VOCAB, 4096, "F16").write(other)
    changed = ModelWork.of(other, ModelParams(), CONTEXT, sizes=(48,), sequences=(1, 3))
    assert not {*changed.signatures[:-1]} & {*work.signatures}
    assert changed.signatures[-1] == work.signatures[-1]


def test_traffic_is_that_of_a_real_step(work, files):
    traffic = work.traffic
    assert traffic.activation == EMBD * 4
    assert traffic.logits == VOCAB * 4
    assert traffic.embedding >= EMBD * 4
    assert 0 < traffic.again < 1
    with Rehearsal(files["llama"], ModelParams(), 2) as rehearsal:
        (step,) = rehearsal.run(CONTEXT, [Step(100)])
    rows = sum(len(graph.rows) for graph in step.graphs)
    nodes = sum(graph.n_nodes for graph in step.graphs)
    assert traffic.graph * (LAYERS + 1) == pytest.approx(rows * EXT_TENSOR.itemsize, rel=0.1)
    assert traffic.nodes * (LAYERS + 1) == pytest.approx(nodes, rel=0.05)
    for number, first in enumerate((True, False)):
        predicted = traffic.inputs(100, step.n_kv, first=first)
        if first:
            # the first time also what never changes
            predicted += 100 * traffic.alone
        assert predicted == pytest.approx(step.written[number], rel=0.01)


def test_the_heads_times_are_not_negative(work):
    head = work.head
    assert min(head.build, head.build_stage, head.token, head.reuse, head.reuse_stage) >= 0
    assert head.build + head.build_stage > 0
    assert head.reuse + head.reuse_stage > 0
    assert head.sample > 0


def test_times_of_a_device_follow_from_its_speeds(work):
    slow = work.times(DeviceProfile("slow", gflops=10, gbps=1e6))
    layer = work.layer_work(128, 256)
    assert slow.prompt.at(128, 256)[1] == pytest.approx(2 * layer[1].multiply_adds / 1e10, rel=0.02)
    narrow = work.times(DeviceProfile("narrow", gflops=1e9, gbps=2))
    moved = work.layer_work(1, 256, "decode")[1].moved
    assert narrow.decode.at(1, 256)[1] == pytest.approx(moved / 2e9, rel=0.02)
    # between the points, too, by the tokens
    assert slow.prompt.at(64, 256)[1] == pytest.approx(slow.prompt.at(128, 256)[1] / 2, rel=0.05)
    assert slow.prompt.at(128, 256)[-1] == 0
    assert slow.decode.at(1, 256)[-1] > 0


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "experts", "windows"])
def test_layers_are_where_the_engine_would_put_them(files, name):
    """The nodes of some layers are those that a device with these layers is given."""
    steps = [Step(32), Step(1, "all")]
    with Rehearsal(files[name], ModelParams()) as rehearsal:
        n_layer = rehearsal.n_layer
        whole = [step.graphs[0] for step in rehearsal.run(CONTEXT, steps)]
    for count in range(1, n_layer + 1):
        split = (count, n_layer + 1 - count)
        with Rehearsal(files[name], ModelParams(), 2, split=split) as rehearsal:
            halves = [step.graphs for step in rehearsal.run(CONTEXT, steps)]
        for graph, (first, second) in zip(whole, halves, strict=True):
            here = layers_of(graph, n_layer) < count
            assert (here.sum(), (~here).sum()) == (first.n_nodes, second.n_nodes)


def test_a_recurrent_model_has_one_length(files):
    work = ModelWork.of(files["mamba"], ModelParams(), CONTEXT, sequences=(1, 2))
    assert len({point.n_kv for point in work.prompt}) == 1
    assert {point.n_tokens for point in work.decode} == {1, 2}
    assert all(one.multiply_adds > 0 for one in work.layer_work(128, 256)[:-1])
    assert work.classes[1:-2] == (1,) * (work.n_layer - 2)


def test_a_small_context_has_points_too(files):
    context = ContextParams(n_ctx=200, n_ubatch=512)
    work = ModelWork.of(files["llama"], ModelParams(n_gpu_layers=3), context)
    assert {(point.n_tokens, point.n_kv) for point in work.prompt} == {
        (16, 256), (64, 256), (256, 256)
    }  # fmt: skip
    assert {(point.n_tokens, point.n_kv) for point in work.decode} == {(1, 256)}


@pytest.mark.parametrize(
    "context",
    [
        ContextParams(n_ctx=1024, n_ubatch=64, swa_full=False),
        ContextParams(n_ctx=1024, n_batch=32, type_k="q8_0", type_v="q8_0"),
        ContextParams(n_ctx=1024, n_ubatch=128, flash_attn="off"),
        ContextParams(n_ctx=512, n_ubatch=1),
        ContextParams(n_ctx=2048, n_ubatch=128, n_seq_max=4, kv_unified=True),
    ],
)
def test_contexts_of_all_kinds_can_be_rehearsed(files, context):
    work = ModelWork.of(files["windows"], ModelParams(), context, sequences=(1, 4))
    full = min(context.n_ubatch, context.n_batch)
    assert max(point.n_tokens for point in work.prompt) == full
    assert {point.n_tokens for point in work.decode} == {1, 4}
    assert all(one.multiply_adds > 0 for one in work.layer_work(1, 256, "decode"))
    with Rehearsal(files["windows"], ModelParams(), 3) as rehearsal:
        (step,) = rehearsal.run(context, [Step(full, at=0)])
    told = work.traffic.inputs(full, step.n_kv, first=False)
    assert told == pytest.approx(step.written[1], rel=0.1)


def test_between_the_points_times_are_those_of_the_graph_itself(work, files):
    speed = Speed(gflops=40, gbps=4)
    times = work.times(DeviceProfile("some", gflops=speed.gflops, gbps=speed.gbps))
    with Rehearsal(files["llama"], ModelParams()) as rehearsal:
        found = rehearsal.run(CONTEXT, [Step(20, at=492), Step(90, at=678), Step(1, "all", at=700)])
    for step, grid in zip(found, (times.prompt, times.prompt, times.decode), strict=True):
        (graph,) = step.graphs
        real = nanoseconds(Table(graph.rows, graph.n_nodes), speed) / 1e9
        assert grid.at(step.n_tokens, step.n_kv).sum() == pytest.approx(real, rel=0.03)


def test_two_sequences_take_longer_than_one_where_only_one_and_three_were_looked_at(work, files):
    speed = Speed(gflops=40, gbps=4)
    grid = work.times(DeviceProfile("some", gflops=speed.gflops, gbps=speed.gbps)).decode
    with Rehearsal(files["llama"], ModelParams()) as rehearsal:
        context = ContextParams(n_ctx=2 * 1024, n_ubatch=128)
        (step,) = rehearsal.run(context, [Step(1, "all", at=1023)], 2)
    (graph,) = step.graphs
    real = nanoseconds(Table(graph.rows, graph.n_nodes), speed) / 1e9
    assert grid.at(2, 1024).sum() == pytest.approx(real, rel=0.03)
