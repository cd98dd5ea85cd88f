"""Other models than `caravan model fake` makes, without weights: recurrent, experts, windows."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.gguf_writer import WriterState

from caravan.models import fake
from caravan.models.fake import MARK, FakeModel

LAYERS, EMBD, VOCAB = 8, 512, 2000
_WORDS = FakeModel(layers=1, embd=EMBD, heads=8, kv_heads=2, ff=1024, vocab=VOCAB)
_F32, _Q8 = GGMLQuantizationType.F32, GGMLQuantizationType.Q8_0


def mamba(path: Path) -> None:
    inner, state, rank, conv = 1024, 16, 32, 4

    def describe(writer: Any) -> None:
        writer.add_feed_forward_length(0)
        writer.add_head_count(0)
        writer.add_ssm_conv_kernel(conv)
        writer.add_ssm_inner_size(inner)
        writer.add_ssm_state_size(state)
        writer.add_ssm_time_step_rank(rank)

    layer = {
        "attn_norm.weight": (EMBD,),
        "ssm_in.weight": (EMBD, 2 * inner),
        "ssm_conv1d.weight": (conv, inner),
        "ssm_conv1d.bias": (inner,),
        "ssm_x.weight": (inner, rank + 2 * state),
        "ssm_dt.weight": (rank, inner),
        "ssm_dt.bias": (inner,),
        "ssm_a": (state, inner),
        "ssm_d": (inner,),
        "ssm_out.weight": (inner, EMBD),
    }
    _write(path, "mamba", describe, layer, ("ssm_conv1d.weight", "ssm_a"))


def experts(path: Path) -> None:
    count, ff, kv = 8, 256, 128

    def describe(writer: Any) -> None:
        writer.add_feed_forward_length(ff)
        writer.add_head_count(8)
        writer.add_head_count_kv(2)
        writer.add_rope_dimension_count(64)
        writer.add_expert_count(count)
        writer.add_expert_used_count(2)

    layer = {
        **_attention(EMBD, kv),
        "ffn_norm.weight": (EMBD,),
        "ffn_gate_inp.weight": (EMBD, count),
        "ffn_gate_exps.weight": (EMBD, ff, count),
        "ffn_up_exps.weight": (EMBD, ff, count),
        "ffn_down_exps.weight": (ff, EMBD, count),
    }
    _write(path, "llama", describe, layer, ("ffn_gate_inp.weight",))


def windows(path: Path) -> None:
    ff, kv = 1024, 256

    def describe(writer: Any) -> None:
        writer.add_feed_forward_length(ff)
        writer.add_head_count(8)
        writer.add_head_count_kv(4)
        writer.add_key_length(64)
        writer.add_value_length(64)
        writer.add_sliding_window(512)

    layer = {
        **_attention(EMBD, kv),
        "post_attention_norm.weight": (EMBD,),
        "ffn_norm.weight": (EMBD,),
        "ffn_gate.weight": (EMBD, ff),
        "ffn_up.weight": (EMBD, ff),
        "ffn_down.weight": (ff, EMBD),
        "post_ffw_norm.weight": (EMBD,),
    }
    _write(path, "gemma2", describe, layer)


def _attention(embd: int, kv: int) -> dict[str, tuple[int, ...]]:
    return {
        "attn_norm.weight": (embd,),
        "attn_q.weight": (embd, embd),
        "attn_k.weight": (embd, kv),
        "attn_v.weight": (embd, kv),
        "attn_output.weight": (embd, embd),
    }


def _write(
    path: Path,
    arch: str,
    describe: Callable[[Any], None],
    layer: dict[str, tuple[int, ...]],
    plain: tuple[str, ...] = (),
) -> None:
    """The file as `FakeModel` would write it; matrices are Q8_0 but for the `plain` ones."""
    writer = GGUFWriter(None, arch)
    writer.add_uint64(MARK, 0)
    writer.add_block_count(LAYERS)
    writer.add_context_length(8192)
    writer.add_embedding_length(EMBD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    describe(writer)
    _WORDS._add_vocabulary(writer)
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (EMBD, VOCAB)}
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
    tensors["output_norm.weight"] = (EMBD,)
    tensors["output.weight"] = (EMBD, VOCAB)
    if arch == "gemma2":  # shares them with the embeddings
        del tensors["output.weight"]
    size = 0
    for name, shape in tensors.items():
        kind = _F32 if len(shape) == 1 or name.endswith(plain or ("?",)) else _Q8
        block, each = GGML_QUANT_SIZES[kind]
        count = int(np.prod(shape)) // block * each
        writer.add_tensor_info(name, tuple(reversed(shape)), np.dtype(np.float32), count, kind)
        size += -(-count // 32) * 32
    out = io.BytesIO()
    writer.fout, writer.state = [io.BufferedWriter(out)], WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    header = bytearray(out.getvalue())
    header += bytes(-len(header) % 32 or 32)
    at = header.index(fake._entry()) + fake._ENTRY.size
    struct.pack_into("<Q", header, at, len(header) + size)
    path.write_bytes(header)
