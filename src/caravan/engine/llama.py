"""Thin calls of llama's C functions, and its parameter structs per version.

Typed once in the table below, as in `ggml`. Sources: llama.h of the llama.cpp releases with ggml
0.25.3 (backend API 2) and 0.26.0 (API 3); `verify` compares the defaults with known values.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t
_I8, _I32, _U32, _I64, _U64 = (
    ctypes.c_int8,
    ctypes.c_int32,
    ctypes.c_uint32,
    ctypes.c_int64,
    ctypes.c_uint64,
)
_INT = ctypes.c_int
_BOOL = ctypes.c_bool
_FLOAT = ctypes.c_float
_TEXT = ctypes.c_char_p

ProgressCallback = ctypes.CFUNCTYPE(_BOOL, _FLOAT, _P)
LogCallback = ctypes.CFUNCTYPE(None, _INT, _TEXT, _P)


class ModelParams(ctypes.Structure):
    """llama_model_params."""

    _fields_ = [
        ("devices", _P),
        ("tensor_buft_overrides", _P),
        ("n_gpu_layers", _I32),
        ("split_mode", _INT),
        ("load_mode", _INT),
        ("lazy_mode", _INT),
        ("main_gpu", _I32),
        ("tensor_split", _P),
        ("progress_callback", ProgressCallback),
        ("progress_callback_user_data", _P),
        ("kv_overrides", _P),
        ("vocab_only", _BOOL),
        ("check_tensors", _BOOL),
        ("use_extra_bufts", _BOOL),
        ("no_host", _BOOL),
        ("no_alloc", _BOOL),
        ("load_mtp", _BOOL),
    ]


class TensorBuftOverride(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = [("pattern", _TEXT), ("buft", _P)]


_CONTEXT_HEAD: list[Any] = [
    ("n_ctx", _U32),
    ("n_batch", _U32),
    ("n_ubatch", _U32),
    ("n_seq_max", _U32),
    ("n_rs_seq", _U32),
    ("n_outputs_max", _U32),
    ("n_outputs_max_per_seq", _U32),
    ("n_threads", _I32),
    ("n_threads_batch", _I32),
    ("ctx_type", _INT),
    ("rope_scaling_type", _INT),
    ("pooling_type", _INT),
    ("attention_type", _INT),
    ("flash_attn_type", _INT),
    ("rope_freq_base", _FLOAT),
    ("rope_freq_scale", _FLOAT),
    ("yarn_ext_factor", _FLOAT),
    ("yarn_attn_factor", _FLOAT),
    ("yarn_beta_fast", _FLOAT),
    ("yarn_beta_slow", _FLOAT),
    ("yarn_orig_ctx", _U32),
    ("defrag_thold", _FLOAT),
    ("cb_eval", _P),
    ("cb_eval_user_data", _P),
    ("type_k", _INT),
    ("type_v", _INT),
]
_CONTEXT_TAIL: list[Any] = [
    ("abort_callback", _P),
    ("abort_callback_data", _P),
    ("embeddings", _BOOL),
    ("offload_kqv", _BOOL),
    ("no_perf", _BOOL),
    ("op_offload", _BOOL),
    ("swa_full", _BOOL),
    ("kv_unified", _BOOL),
    ("samplers", _P),
    ("n_samplers", _SIZE),
    ("ctx_other", _P),
]


class ContextParams2(ctypes.Structure):
    """llama_context_params beside backend API 2."""

    _fields_ = [*_CONTEXT_HEAD, *_CONTEXT_TAIL]


class ContextParams3(ctypes.Structure):
    """llama_context_params beside backend API 3."""

    _fields_ = [*_CONTEXT_HEAD, ("moe_cache_size", _SIZE), *_CONTEXT_TAIL]


class KvOverride(ctypes.Structure):
    """llama_model_kv_override of a text; the value is aligned like its numbers."""

    _fields_ = [
        ("tag", _INT),
        ("key", ctypes.c_char * 128),
        ("gap", _INT),
        ("text", ctypes.c_char * 128),
    ]

    STR = 3


class Batch(ctypes.Structure):
    """llama_batch."""

    _fields_ = [
        ("n_tokens", _I32),
        ("token", _P),
        ("embd", _P),
        ("pos", _P),
        ("n_seq_id", _P),
        ("seq_id", _P),
        ("logits", _P),
    ]


class SamplerChainParams(ctypes.Structure):
    """llama_sampler_chain_params."""

    _fields_ = [("no_perf", _BOOL)]


class TokenDataArray(ctypes.Structure):
    """llama_token_data_array; `data` has elements of TOKEN_DATA."""

    _fields_ = [("data", _P), ("size", _SIZE), ("selected", _I64), ("sorted", _BOOL)]


# structs that are made as arrays: llama_token_data and llama_logit_bias
TOKEN_DATA = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
LOGIT_BIAS = np.dtype([("token", "<i4"), ("bias", "<f4")])

# attribute: (result, argument types); the C name is "llama_" + attribute
_TABLE: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "backend_init": (None, ()),
    "log_set": (None, (_P, _P)),
    "max_devices": (_SIZE, ()),
    "supports_mmap": (_BOOL, ()),
    "model_default_params": (ModelParams, ()),
    "model_load_from_file": (_P, (_TEXT, ModelParams)),
    "model_load_from_splits": (_P, (_P, _SIZE, ModelParams)),
    "model_free": (None, (_P,)),
    "model_desc": (_I32, (_P, _P, _SIZE)),
    "model_size": (_U64, (_P,)),
    "model_n_params": (_U64, (_P,)),
    "model_n_layer": (_I32, (_P,)),
    "model_n_layer_nextn": (_I32, (_P,)),
    "model_is_recurrent": (_BOOL, (_P,)),
    "model_n_embd": (_I32, (_P,)),
    "model_n_embd_out": (_I32, (_P,)),
    "model_n_ctx_train": (_I32, (_P,)),
    "model_has_encoder": (_BOOL, (_P,)),
    "model_has_decoder": (_BOOL, (_P,)),
    "model_get_vocab": (_P, (_P,)),
    "model_chat_template": (_TEXT, (_P, _TEXT)),
    "model_meta_val_str": (_I32, (_P, _TEXT, _P, _SIZE)),
    "vocab_n_tokens": (_I32, (_P,)),
    "vocab_type": (_INT, (_P,)),
    "vocab_bos": (_I32, (_P,)),
    "vocab_eos": (_I32, (_P,)),
    "vocab_is_eog": (_BOOL, (_P, _I32)),
    "vocab_get_add_bos": (_BOOL, (_P,)),
    "tokenize": (_I32, (_P, _TEXT, _I32, _P, _I32, _BOOL, _BOOL)),
    "token_to_piece": (_I32, (_P, _I32, _P, _I32, _I32, _BOOL)),
    "init_from_model": (_P, (_P, _P)),  # the parameters' type depends on the version: see `use`
    "free": (None, (_P,)),
    "n_ctx": (_U32, (_P,)),
    "n_ctx_seq": (_U32, (_P,)),
    "get_causal_attn": (_BOOL, (_P,)),
    "n_batch": (_U32, (_P,)),
    "n_ubatch": (_U32, (_P,)),
    "set_n_threads": (None, (_P, _I32, _I32)),
    "decode": (_I32, (_P, Batch)),
    "encode": (_I32, (_P, Batch)),
    "synchronize": (None, (_P,)),
    "get_logits_ith": (_P, (_P, _I32)),
    "get_embeddings_ith": (_P, (_P, _I32)),
    "get_embeddings_seq": (_P, (_P, _I32)),
    "get_memory": (_P, (_P,)),
    "memory_clear": (None, (_P, _BOOL)),
    "memory_seq_rm": (_BOOL, (_P, _I32, _I32, _I32)),
    "memory_seq_cp": (None, (_P, _I32, _I32, _I32, _I32)),
    "memory_seq_pos_max": (_I32, (_P, _I32)),
    "state_seq_get_size": (_SIZE, (_P, _I32)),
    "state_seq_get_data": (_SIZE, (_P, _P, _SIZE, _I32)),
    "state_seq_set_data": (_SIZE, (_P, _P, _SIZE, _I32)),
    "sampler_chain_default_params": (SamplerChainParams, ()),
    "sampler_chain_init": (_P, (SamplerChainParams,)),
    "sampler_chain_add": (None, (_P, _P)),
    "sampler_free": (None, (_P,)),
    "sampler_reset": (None, (_P,)),
    "sampler_accept": (None, (_P, _I32)),
    "sampler_apply": (None, (_P, _P)),
    "sampler_sample": (_I32, (_P, _P, _I32)),
    "sampler_init_greedy": (_P, ()),
    "sampler_init_dist": (_P, (_U32,)),
    "sampler_init_top_k": (_P, (_I32,)),
    "sampler_init_top_p": (_P, (_FLOAT, _SIZE)),
    "sampler_init_min_p": (_P, (_FLOAT, _SIZE)),
    "sampler_init_temp": (_P, (_FLOAT,)),
    "sampler_init_logit_bias": (_P, (_I32, _I32, _P)),
    "sampler_init_grammar": (_P, (_P, _TEXT, _TEXT)),
    "sampler_init_penalties": (_P, (_I32, _I32, _FLOAT, _FLOAT, _FLOAT)),
}


class Llama:
    """llama's functions; see `_TABLE`.

    Attributes:
        ContextParams: the struct of this version.
    """

    def __init__(self, find: Callable[[str], Any], api_version: int) -> None:
        for attribute, (result, arguments) in _TABLE.items():
            function = find(f"llama_{attribute}")
            function.restype, function.argtypes = result, arguments
            setattr(self, attribute, function)
        self.ContextParams: Any = ContextParams2 if api_version < 3 else ContextParams3
        self.context_default_params: Any = find("llama_context_default_params")
        self.context_default_params.restype = self.ContextParams
        self.context_default_params.argtypes = ()
        self.init_from_model.argtypes = (_P, self.ContextParams)

    def __getattr__(self, name: str) -> Any:  # only for names that the table does not have
        raise AttributeError(f"llama has no thin call {name!r}")
