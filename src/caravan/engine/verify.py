"""Is the loaded engine the one that the layouts describe? Asked once, before anything uses them.

Every slot of the plug-in interfaces, every struct that is read or written directly and every table
is compared through the library's public functions. What differs ends in AbiMismatch, because a
wrong offset would corrupt memory instead. Called by `library`.
"""

from __future__ import annotations

import ctypes
import platform
from typing import TYPE_CHECKING, Any

import numpy as np

from caravan.engine import layouts
from caravan.engine.llama import Batch, ModelParams
from caravan.engine.probe import STEPS, TENSOR_STEPS, Probe
from caravan.errors import AbiMismatch, EngineNotFound

if TYPE_CHECKING:
    from caravan.engine.library import Engine

SUPPORTED = "ggml 0.25 with backend API 2 and ggml 0.26 with backend API 3"

# no public function calls these; the offsets of what comes after them are checked
UNREACHABLE = {"backend.graph_plan_update", "backend.graph_optimize"}

_TENSOR_OVERHEAD = 368
_GRAPH_OVERHEAD = 41424  # of a graph for 1024 nodes
_NAME = b"0123456789abcdef"
_F32 = 0

_MODEL_DEFAULTS = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback_user_data": None,
    "kv_overrides": None,
    "vocab_only": False,
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
    "no_alloc": False,
    "load_mtp": False,
}
_CONTEXT_DEFAULTS = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_ext_factor": -1.0,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1.0,
    "cb_eval": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": None,
    "embeddings": False,
    "offload_kqv": True,
    "no_perf": True,
    "op_offload": True,
    "swa_full": True,
    "kv_unified": False,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}


class _Differs(Exception):
    """What was found, in words."""


def check(engine: Engine) -> None:
    """Raises AbiMismatch, naming what was found and what is supported."""
    try:
        _check_tables(engine)
        probe = Probe(engine.find, engine.layouts)
        _check_sizes(engine, probe)
        _check_parameters(engine)
        _check_slots(engine, probe)
    except (_Differs, EngineNotFound) as exc:
        raise AbiMismatch(
            f"the engine at {engine.path} (ggml {engine.version}, backend API"
            f" {engine.api_version}) is not one that Caravan knows: {exc}; it knows {SUPPORTED}"
        ) from exc


def _same(what: str, found: object, expected: object) -> None:
    if found != expected:
        raise _Differs(f"{what} is {found!r}, not {expected!r}")


def _check_tables(engine: Engine) -> None:
    """Numbers that go over the wire: ops by name, and the sizes of all types.

    An op that a newer engine has after ours does no harm: it is refused where it turns up.
    """
    ggml = engine.ggml
    for number, name in enumerate(layouts.OP_NAMES):
        _same(f"op {number}", ggml.op_name(number), name.encode())
    for number in range(layouts.TYPE_COUNT):
        found = (ggml.blck_size(number), ggml.type_size(number))
        expected = (int(layouts.TYPE_BLOCK[number]), int(layouts.TYPE_BYTES[number]))
        _same(f"block and bytes of type {number}", found, expected)


def _check_sizes(engine: Engine, probe: Probe) -> None:
    _same("the size of a tensor", engine.ggml.tensor_overhead(), _TENSOR_OVERHEAD)
    graph = probe.call("ggml_graph_overhead_custom", 1024, 0)
    _same("the size of a graph", graph, _GRAPH_OVERHEAD)
    props = probe.written("ggml_backend_dev_get_props", "device")
    _same("the size of device properties", props, ctypes.sizeof(layouts.DeviceProps))
    if platform.machine() not in ("x86_64", "AMD64"):
        return  # only there is a returned struct written through the first argument
    for symbol, struct in (
        ("llama_model_default_params", ModelParams),
        ("llama_context_default_params", engine.llama.ContextParams),
    ):
        # what is left of the last word need not be written
        words = -(-probe.written(symbol) // 8)
        _same(f"the size of the struct of {symbol}", words * 8, ctypes.sizeof(struct))


def _check_parameters(engine: Engine) -> None:
    for what, found, expected in (
        ("model", engine.llama.model_default_params(), _MODEL_DEFAULTS),
        ("context", engine.llama.context_default_params(), _CONTEXT_DEFAULTS),
    ):
        for field, value in expected.items():
            _same(f"the default {field} of a {what}", getattr(found, field), value)
    get_one = engine.find("llama_batch_get_one")
    get_one.restype, get_one.argtypes = Batch, (ctypes.c_void_p, ctypes.c_int32)
    batch = get_one(0x1000, 3)
    found = [getattr(batch, name) for name, *_ in Batch._fields_]
    _same("a batch", found, [3, 0x1000, None, None, None, None, None])


def _check_slots(engine: Engine, probe: Probe) -> None:
    ggml, things = engine.ggml, probe.things
    context = ggml.init(layouts.InitParams(1 << 20, None, True))
    if not context:
        raise _Differs("no ggml context")
    try:
        things["tensor"] = ggml.new_tensor_4d(context, _F32, 4, 3, 2, 1)
        things["other"] = ggml.new_tensor_4d(context, _F32, 4, 3, 2, 1)
        _check_tensor(engine, probe, context)
        _check_graph(engine, context)
        _check_links(engine, probe)
        _walk(engine, probe, STEPS)
        _check_placed(engine, probe)
        _walk(engine, probe, TENSOR_STEPS)
    finally:
        ggml.free(context)


def _walk(engine: Engine, probe: Probe, steps: tuple[Any, ...]) -> None:
    known = probe.slots()
    for slot, symbol, arguments in steps:
        if slot in known:
            probe.call(symbol, *arguments)
            _same(f"what {symbol} calls", probe.seen, [slot])


def _tensor(address: int) -> Any:
    raw = ctypes.string_at(address, layouts.GGML_TENSOR.itemsize)
    return np.frombuffer(raw, layouts.GGML_TENSOR)[0]


def _check_tensor(engine: Engine, probe: Probe, context: int) -> None:
    tensor = probe.things["tensor"]
    set_name = engine.find("ggml_set_name")
    set_name.restype, set_name.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_char_p)
    set_name(tensor, _NAME)
    probe.call("ggml_set_input", "tensor")
    row = _tensor(tensor)
    for field, expected in (
        ("type", _F32),
        ("ne", [4, 3, 2, 1]),
        ("nb", [4, 16, 48, 96]),
        ("op", 0),
        ("flags", layouts.FLAG_INPUT),
        ("name", _NAME),
        ("buffer", 0),
        ("data", 0),
        ("extra", 0),
    ):
        _same(f"a tensor's {field}", row[field].tolist(), expected)
    view_of = engine.find("ggml_view_1d")
    view_of.restype = ctypes.c_void_p
    view_of.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t)
    row = _tensor(view_of(context, tensor, 2, 8))
    view = (layouts.OP_NAMES[row["op"]], int(row["view_src"]), int(row["view_offs"]))
    _same("a view's op, source and offset", view, ("VIEW", tensor, 8))
    scaled = engine.find("ggml_scale")
    scaled.restype = ctypes.c_void_p
    scaled.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_float)
    row = _tensor(scaled(context, tensor, 2.5))
    node = (float(row["op_params"].view("<f4")[0]), int(row["src"][0]), int(row["src"][1]))
    _same("a node's parameter and sources", node, (2.5, tensor, 0))


def _check_graph(engine: Engine, context: int) -> None:
    ggml = engine.ggml
    a = ggml.new_tensor_4d(context, _F32, 4, 1, 1, 1)
    total = ggml.add(context, a, a)
    address = ggml.new_graph(context)
    ggml.build_forward_expand(address, total)
    raw = ctypes.string_at(address, layouts.CGRAPH.itemsize)
    graph = np.frombuffer(raw, layouts.CGRAPH)[0]
    word = ctypes.c_size_t.from_address
    counts = (int(graph["n_nodes"]), int(graph["n_leafs"]))
    _same("a graph's counts", counts, (1, 1))
    first = (word(int(graph["nodes"])).value, word(int(graph["leafs"])).value)
    _same("a graph's node and leaf", first, (total, a))
    keys = (ctypes.c_size_t * int(graph["hash_size"])).from_address(int(graph["hash_keys"]))
    uses = ctypes.c_int32.from_address(int(graph["use_counts"]) + 4 * list(keys).index(a)).value
    _same("a leaf's uses in a graph", uses, 2)


def _check_links(engine: Engine, probe: Probe) -> None:
    """Fields beside the interfaces; those after an interface also tell its size."""
    things = probe.things
    buffer = engine.layouts.Buffer.from_address(things["buffer"])
    _same("a buffer's type", probe.call("ggml_backend_buffer_get_type", "buffer"), buffer.buft)
    _same("a buffer's size", probe.call("ggml_backend_buffer_get_size", "buffer"), buffer.size)
    _same("a buffer's size", buffer.size, 1 << 62)
    _same("a buffer's context", buffer.context, things["text"])
    probe.call("ggml_backend_buffer_set_usage", "buffer", layouts.USAGE_COMPUTE)
    _same("a buffer's usage", buffer.usage, layouts.USAGE_COMPUTE)
    for what, symbol, thing, expected in (
        ("a device's registry", "ggml_backend_dev_backend_reg", "device", "reg"),
        ("a buffer type's device", "ggml_backend_buft_get_device", "buffer_type", "device"),
        ("a backend's device", "ggml_backend_get_device", "backend", "device"),
    ):
        _same(what, probe.call(symbol, thing), things[expected])
    guid = probe.call("ggml_backend_guid", "backend")
    _same("a backend's guid", guid, things["text"] - 1)


def _check_placed(engine: Engine, probe: Probe) -> None:
    """Put both tensors into the probe's buffer, and see where the engine notes that."""
    for name in ("tensor", "other"):
        probe.call("ggml_backend_tensor_alloc", "buffer", name, "text")
        row = _tensor(probe.things[name])
        found = (int(row["buffer"]), int(row["data"]))
        expected = (probe.things["buffer"], probe.things["text"])
        _same("a tensor's buffer and data", found, expected)
