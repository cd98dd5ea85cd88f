"""Tiny models of many architectures, with random weights: made by asking the engine what it misses.

`ARCHITECTURES` has what the engine wants to know first, and tensors that it does without but whose
absence it does not bear. Everything else comes out of its own words.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter

from caravan.errors import ModelError
from caravan.llm import Model, ModelParams
from caravan.models.fake import FakeModel

VOCAB = 320
_MISSING = re.compile(r"(?:missing tensor|tensor) '([^']+)'(?: not found)?$")
_SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected\s+([\d, ]+), got")

Values = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

_PLAIN: Values = {
    "block_count": 2,
    "context_length": 256,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 2,
    "attention.head_count_kv": 1,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.layer_norm_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
    "rope.dimension_count": 32,
}
_EXPERTS: Values = {
    "expert_count": 4,
    "expert_used_count": 2,
    "expert_feed_forward_length": 32,
    "expert_shared_feed_forward_length": 32,
}
_WIDE: Values = {"attention.key_length": 32, "attention.value_length": 32}
_WINDOW: Values = {**_WIDE, "attention.sliding_window": 16}
_STATES: Values = {
    "ssm.conv_kernel": 4,
    "ssm.inner_size": 128,
    "ssm.state_size": 16,
    "ssm.time_step_rank": 4,
    "ssm.group_count": 2,
}
_NO_HEADS: Values = {"attention.head_count": 0, "feed_forward_length": 0}
_LATENT: Values = {
    **_EXPERTS,
    "attention.kv_lora_rank": 32,
    "attention.key_length": 48,
    "attention.value_length": 32,
    "attention.key_length_mla": 32,
    "attention.value_length_mla": 16,
    "rope.dimension_count": 16,
    "expert_shared_count": 1,
    "leading_dense_block_count": 1,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 2,
}
_RWKV: Values = {
    "wkv.head_size": 64,
    "attention.head_count": 0,
    "token_shift_count": 2,
    "time_mix_extra_dim": 8,
    "time_decay_extra_dim": 8,
    "rescale_every_n_layers": 6,
}
_RWKV7: Values = {
    **_RWKV,
    "attention.decay_lora_rank": 8,
    "attention.iclr_lora_rank": 8,
    "attention.value_residual_mix_lora_rank": 8,
    "attention.gate_lora_rank": 8,
}
_XIELU: Values = {
    f"xielu.{name}": [value] * 2
    for name, value in (("alpha_n", 0.8), ("alpha_p", 0.8), ("beta", 0.5), ("eps", -1e-6))
}

ARCHITECTURES: dict[str, tuple[Values, Shapes]] = {
    "llama": (_EXPERTS, {}),
    "qwen2moe": (_EXPERTS, {}),
    "granitemoe": ({**_EXPERTS, "logit_scale": 1.0}, {}),
    "gpt-oss": ({**_EXPERTS, **_WINDOW}, {}),
    "gemma2": ({}, {}),
    "gemma3": (_WINDOW, {}),
    "cohere2": ({"attention.sliding_window": 16, "logit_scale": 1.0}, {}),
    "falcon": ({}, {}),
    "mpt": (
        {
            "attention.head_count_kv": 2,
            "attention.max_alibi_bias": 8.0,
            "attention.clamp_kqv": 6.0,
        },
        {},
    ),
    "gpt2": ({"attention.head_count_kv": 2}, {"position_embd.weight": (64, 256)}),
    "olmo2": ({}, {}),
    "chatglm": ({}, {}),
    "bitnet": ({}, {}),
    "apertus": (_XIELU, {}),
    "lfm2": ({"shortconv.l_cache": 3, "attention.head_count_kv": [0, 1]}, {}),
    "phi3": (
        {
            "attention.head_count_kv": 2,
            "rope.dimension_count": 24,
            "rope.scaling.original_context_length": 128,
        },
        {
            "rope_factors_long.weight": (12,),
            "rope_factors_short.weight": (12,),
            "blk.*.attn_qkv.weight": (64, 192),
        },
    ),
    "deepseek2": ({**_LATENT, "attention.q_lora_rank": 32}, {}),
    "deepseek32": (
        {
            **_LATENT,
            "attention.q_lora_rank": 32,
            "attention.key_length": 64,
            "attention.key_length_mla": 64,
            "attention.value_length_mla": 32,
            "attention.indexer.head_count": 2,
            "attention.indexer.key_length": 64,
            "attention.indexer.top_k": 8,
            "rope.dimension_count": 32,
        },
        {},
    ),
    "kimi-linear": (
        {**_LATENT, **_STATES, "attention.head_count_kv": [0, 1], "kda.head_dim": 16},
        {},
    ),
    "qwen3next": (
        {**_EXPERTS, **_STATES, **_WIDE, "block_count": 4, "ssm.inner_size": 64},
        {"blk.[0-2].attn_qkv.weight": (64, 128), "blk.[0-2].attn_gate.weight": (64, 64)},
    ),
    "jamba": ({**_EXPERTS, **_STATES, "attention.head_count_kv": [0, 1]}, {}),
    "mamba": ({**_STATES, **_NO_HEADS}, {}),
    "mamba2": ({**_STATES, **_NO_HEADS}, {}),
    "rwkv6": (_RWKV, {"blk.*.time_mix_lerp_fused.weight": (64, 1, 1, 5)}),
    "rwkv6qwen2": ({**_RWKV, "attention.head_count_kv": 1, "token_shift_count": 1}, {}),
    "rwkv7": (_RWKV7, {}),
}

_ENCODER: Values = {"attention.causal": False, "attention.head_count_kv": 2, "pooling_type": 1}
_TYPED: Values = {**_ENCODER, "tokenizer.ggml.token_type_count": 2}

# those that make vectors of texts
ENCODERS: dict[str, tuple[Values, Shapes]] = {
    "bert": (
        {**_TYPED, "pooling_type": 2},
        {
            "position_embd.weight": (64, 256),
            "blk.*.attn_q.bias": (64,),
            "blk.*.attn_k.bias": (64,),
            "blk.*.attn_v.bias": (64,),
            "blk.*.attn_output.bias": (64,),
        },
    ),
    "nomic-bert": (_TYPED, {}),
    "modern-bert": ({**_ENCODER, "attention.sliding_window": 16}, {}),
    # every sixth layer sees all of the text
    "gemma-embedding": ({**_ENCODER, **_WINDOW, "block_count": 6}, {}),
}


def make(path: Path, arch: str, changed: Values | None = None, vocabulary: bool = False) -> None:
    """Write a model of the architecture; raises ModelError when the engine wants something else.

    `changed`: values that are not those of the table; `vocabulary`: its tokens stand for texts.
    """
    values, more = {**ARCHITECTURES, **ENCODERS}[arch]
    values = {**_PLAIN, **values, **(changed or {})}
    tensors: Shapes = {"token_embd.weight": (64, VOCAB)}
    for name, shape in more.items():
        layers = range(3 if "[0-2]" in name else values["block_count"])
        many = "*" in name or "[0-2]" in name
        for layer in layers if many else (0,):
            tensors[name.replace("[0-2]", "*").replace("*", str(layer))] = shape
    while True:
        _write(path, arch, values, tensors, vocabulary)
        try:
            with Model(path, ModelParams(repack=False)):
                return
        except ModelError as exc:
            missing, shape_of = _MISSING.search(str(exc)), _SHAPE.search(str(exc))
            if missing and missing[1] not in tensors:
                tensors[missing[1]] = (1,)
            elif shape_of:
                sizes = tuple(int(size) for size in shape_of[2].strip(" ,").split(","))
                if tensors.get(shape_of[1]) == sizes:
                    raise
                tensors[shape_of[1]] = sizes
            else:
                raise


def _write(path: Path, arch: str, values: Values, tensors: Shapes, vocabulary: bool) -> None:
    writer = GGUFWriter(str(path), arch)
    if vocabulary:
        FakeModel(vocab=VOCAB)._add_vocabulary(writer)
    else:
        writer.add_string("tokenizer.ggml.model", "no_vocab")
    for name, value in {**values, "vocab_size": VOCAB}.items():
        key = name if name.startswith(("xielu", "tokenizer")) else f"{arch}.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_array(key, value)
    random = np.random.default_rng(1)
    for name, shape in tensors.items():
        weights = 0.1 * random.standard_normal(tuple(reversed(shape)))
        writer.add_tensor(name, weights.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
