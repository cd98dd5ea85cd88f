"""A model's description without its weights: the header of a GGUF file, and nothing behind it.

`FakeModel` writes one, `caravan model fake` is its command; `described_size` recognises one.
Loading one is the affair of `llm/fake`. The `gguf` package is imported only to write.
"""

from __future__ import annotations

import contextlib
import errno
import io
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from caravan.errors import ModelError, UsageError

MARK = "caravan.fake"

ARCHITECTURES = ("llama", "qwen2", "qwen3")
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K",
    "Q6_K", "IQ4_NL", "IQ4_XS",
)  # fmt: skip

_ALIGNMENT = 32
_MOST_LAYERS = 512  # of llama.cpp
_MOST = 1 << 24
_UNKNOWN, _CONTROL, _NORMAL, _BYTE = 2, 3, 1, 6  # token types
_SPECIAL = ("<unk>", "<s>", "</s>")
_LEAST_VOCAB = len(_SPECIAL) + 256

# The mark as it stands in a file: a key, GGUF_TYPE_UINT64, and the size with all data.
_ENTRY = struct.Struct(f"<Q{len(MARK)}sI")
_UINT64 = 10
_HEAD = 4096


@dataclass(frozen=True, slots=True)
class FakeModel:
    """The shape of a model; the defaults are those of Llama 2 70B. Raises UsageError for a shape
    that no engine could load.

    Attributes:
        arch: one of ARCHITECTURES.
        layers, embd, heads, kv_heads, ff, vocab: as in llama.cpp's names of them.
        ctx: tokens that the model is made for.
        type: one of TYPES, of all matrices; vectors are F32.
    """

    arch: str = "llama"
    layers: int = 80
    embd: int = 8192
    heads: int = 64
    kv_heads: int = 8
    ff: int = 28672
    vocab: int = 32000
    ctx: int = 8192
    type: str = "Q4_0"

    def __post_init__(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        for word, known in ((self.arch, ARCHITECTURES), (self.type, TYPES)):
            if word not in known:
                raise UsageError(f"{word!r} is none of {', '.join(known)}")
        for name, least, most in (
            ("layers", 1, _MOST_LAYERS),
            ("embd", 1, _MOST),
            ("heads", 1, _MOST),
            ("kv_heads", 1, _MOST),
            ("ff", 1, _MOST),
            ("vocab", _LEAST_VOCAB, _MOST),
            ("ctx", 1, (1 << 31) - 1),
        ):
            if not least <= getattr(self, name) <= most:
                raise UsageError(f"{name} {getattr(self, name)} is not in {least}..{most}")
        block, _ = GGML_QUANT_SIZES[GGMLQuantizationType[self.type]]
        for what, value, unit, of in (
            ("embd", self.embd, 2 * self.heads, "twice the number of heads"),
            ("heads", self.heads, self.kv_heads, "the number of kv-heads"),
            ("embd", self.embd, block, f"a block of {self.type}"),
            ("ff", self.ff, block, f"a block of {self.type}"),
        ):
            if value % unit:
                raise UsageError(f"{what} {value} is not a multiple of {unit}, {of}")

    def write(self, path: Path, force: bool = False) -> None:
        """Write the file; raises ModelError, also for one that is there already unless `force`."""
        data = self.header()
        try:
            with path.open("wb" if force else "xb") as file:
                try:
                    file.write(data)
                    file.flush()
                except OSError:
                    # no half of it stays behind; but what is no file of its own is not removed
                    if path.is_file():
                        with contextlib.suppress(OSError):
                            path.unlink()
                    raise
        except FileExistsError as exc:
            raise ModelError(f"{path} exists already; --force overwrites it") from exc
        except OSError as exc:
            full = exc.errno == errno.ENOSPC
            why = "the disk is full" if full else exc.strerror or str(exc)
            raise ModelError(f"cannot write {path}: {why}") from exc

    def header(self) -> bytes:
        """All that comes before the data, with one byte of padding at least."""
        header, size = self._pack("")
        if len(header) % _ALIGNMENT == 0:
            header, size = self._pack(".")
        header += bytes(-len(header) % _ALIGNMENT)
        at = header.index(_entry()) + _ENTRY.size
        struct.pack_into("<Q", header, at, len(header) + size)
        return bytes(header)

    def _pack(self, more: str) -> tuple[bytearray, int]:
        """The header and the size of the data; `more` makes the name longer, and so the header."""
        from gguf import GGUFWriter
        from gguf.gguf_writer import WriterState

        writer = GGUFWriter(None, self.arch)
        # first of all, so that `described_size` need not look far
        writer.add_uint64(MARK, 0)
        self._add_metadata(writer, more)
        self._add_vocabulary(writer)
        size = self._add_tensors(writer)
        buffer = io.BytesIO()
        writer.fout, writer.state = [io.BufferedWriter(buffer)], WriterState.EMPTY
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        return bytearray(buffer.getvalue()), size

    def _add_metadata(self, writer: Any, more: str) -> None:
        from gguf import LlamaFileType

        writer.add_name(f"fake {self.arch}, {self.layers} layers of {self.embd}{more}")
        writer.add_block_count(self.layers)
        writer.add_context_length(self.ctx)
        writer.add_embedding_length(self.embd)
        writer.add_feed_forward_length(self.ff)
        writer.add_head_count(self.heads)
        writer.add_head_count_kv(self.kv_heads)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_dimension_count(self.embd // self.heads)
        writer.add_rope_freq_base(10000.0)
        writer.add_vocab_size(self.vocab)
        kind = "ALL_F32" if self.type == "F32" else f"MOSTLY_{self.type}"
        medium = f"{kind}_M"
        names = LlamaFileType.__members__
        writer.add_file_type(names[medium if medium in names else kind])

    def _add_vocabulary(self, writer: Any) -> None:
        """Every byte is a token, so that all text can be read; the rest has names and no sense."""
        rest = range(self.vocab - _LEAST_VOCAB)
        tokens = [*_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *(f"[{i}]" for i in rest)]
        kinds = [_UNKNOWN, _CONTROL, _CONTROL, *[_BYTE] * 256, *[_NORMAL] * len(rest)]
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([-float(i) for i in range(self.vocab)])
        writer.add_token_types(kinds)
        writer.add_unk_token_id(0)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)

    def _add_tensors(self, writer: Any) -> int:
        """Returns the bytes of their data."""
        import numpy as np
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        total = 0
        for name, shape in self.tensors().items():
            kind = GGMLQuantizationType[self.type if len(shape) > 1 else "F32"]
            block, size = GGML_QUANT_SIZES[kind]
            count = shape[0] * (shape[1] if len(shape) > 1 else 1)
            n_bytes = count // block * size
            # the NumPy type is not looked at when the other one is given
            dtype = np.dtype(np.float32)
            writer.add_tensor_info(name, tuple(reversed(shape)), dtype, n_bytes, kind)
            total += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
        return total

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes by name, in ggml's order: the length of a row first."""
        embd, ff, kv = self.embd, self.ff, self.embd // self.heads * self.kv_heads
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (embd,),
            "attn_q.weight": (embd, embd),
            "attn_k.weight": (embd, kv),
            "attn_v.weight": (embd, kv),
            "attn_output.weight": (embd, embd),
            "ffn_norm.weight": (embd,),
            "ffn_gate.weight": (embd, ff),
            "ffn_down.weight": (ff, embd),
            "ffn_up.weight": (embd, ff),
        }
        if self.arch == "qwen2":
            layer |= {"attn_q.bias": (embd,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        if self.arch == "qwen3":
            head = (embd // self.heads,)
            layer |= {"attn_q_norm.weight": head, "attn_k_norm.weight": head}
        return {
            "token_embd.weight": (embd, self.vocab),
            **{
                f"blk.{i}.{name}": shape
                for i in range(self.layers)
                for name, shape in layer.items()
            },
            "output_norm.weight": (embd,),
            "output.weight": (embd, self.vocab),
        }


def described_size(path: Path) -> int:
    """The bytes that a fake model's file would have with its data; 0 for any other file."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
    except OSError:
        return 0
    at = head.find(_entry())
    if at < 0 or len(head) < at + _ENTRY.size + 8:
        return 0
    return int(struct.unpack_from("<Q", head, at + _ENTRY.size)[0])


def _entry() -> bytes:
    return _ENTRY.pack(len(MARK), MARK.encode(), _UINT64)
