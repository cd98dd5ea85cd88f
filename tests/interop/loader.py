"""A process that is llama.cpp's own client: loads a model on one server and evaluates a prompt.

    python tests/interop/loader.py LIBRARIES HOST:PORT MODEL

Writes the logits of the last token, as float32, to stdout. Uses nothing of Caravan.
"""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

# an assertion of the libraries would run a debugger over this process
os.environ["GGML_NO_BACKTRACE"] = "1"

from llama_cpp import llama_cpp as llama

_P, _N = ctypes.c_void_p, ctypes.c_size_t
PROMPT = tuple(range(100, 140))


def devices_of(libraries: Path, endpoint: str) -> list[int]:
    """Of a server; they need no registration to be used."""
    rpc, ggml = (ctypes.CDLL(str(libraries / f"lib{name}.so.0")) for name in ("ggml-rpc", "ggml"))
    add = rpc.ggml_backend_rpc_add_server
    add.restype, add.argtypes = _P, (ctypes.c_char_p,)
    count, get = ggml.ggml_backend_reg_dev_count, ggml.ggml_backend_reg_dev_get
    count.restype, count.argtypes = _N, (_P,)
    get.restype, get.argtypes = _P, (_P, _N)
    registry = add(endpoint.encode())
    return [get(registry, i) for i in range(count(registry))]


def main() -> None:
    libraries, endpoint, path = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    llama.llama_backend_init()
    params = llama.llama_model_default_params()
    devices = devices_of(libraries, endpoint)
    listed = (_P * (len(devices) + 1))(*devices)
    params.devices = ctypes.addressof(listed)
    model = llama.llama_model_load_from_file(path.encode(), params)
    settings = llama.llama_context_default_params()
    settings.n_ctx, settings.n_threads, settings.n_threads_batch = 256, 1, 1
    context = llama.llama_init_from_model(model, settings)
    assert context
    tokens = (llama.llama_token * len(PROMPT))(*PROMPT)
    assert llama.llama_decode(context, llama.llama_batch_get_one(tokens, len(PROMPT))) == 0
    n_vocab = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(model))
    values = llama.llama_get_logits_ith(context, -1)
    sys.stdout.buffer.write(ctypes.string_at(values, 4 * n_vocab))
    llama.llama_free(context)
    llama.llama_model_free(model)


if __name__ == "__main__":
    main()
