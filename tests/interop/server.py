"""A process that is llama.cpp's own RPC server, through ctypes; ends when it is killed.

    python tests/interop/server.py LIBRARIES HOST:PORT [--threads N] [--devices N] [--cache DIR]

Uses nothing of Caravan.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("libraries", type=Path)
    parser.add_argument("endpoint")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--cache", default=None)
    args = parser.parse_args()
    # an assertion in it would run a debugger over this process
    os.environ["GGML_NO_BACKTRACE"] = "1"
    _base, _cpu, rpc, ggml = (
        ctypes.CDLL(str(args.libraries / f"lib{name}.so.0"), mode=ctypes.RTLD_GLOBAL)
        for name in ("ggml-base", "ggml-cpu", "ggml-rpc", "ggml")
    )
    by_name = ggml.ggml_backend_dev_by_name
    by_name.restype, by_name.argtypes = ctypes.c_void_p, (ctypes.c_char_p,)
    device = by_name(b"CPU")
    if not device:
        raise SystemExit("no CPU device")
    # several entries of the one device are as many devices to its clients
    devices = (ctypes.c_void_p * args.devices)(*[device] * args.devices)
    start = rpc.ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = (
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.c_void_p,
    )
    cache = os.fsencode(args.cache) if args.cache else None
    start(args.endpoint.encode(), cache, args.threads, args.devices, ctypes.addressof(devices))


if __name__ == "__main__":
    main()
