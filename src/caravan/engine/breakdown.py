"""What a llama_context and its model take of each buffer type: the engine's own account.

It comes as a C++ map by value, which no C function gives: read here as the GNU library lays one
out, and given back to it. Elsewhere, and with engines that do not tell, there is no account.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

from caravan.engine.library import Engine
from caravan.errors import EngineNotFound

_ACCOUNT = "_Z26llama_get_memory_breakdownPK13llama_context"
# the GNU library alone has this one
_NEXT = "_ZSt18_Rb_tree_incrementPSt18_Rb_tree_node_base"
_DELETE = "_ZdlPv"
_P = ctypes.c_void_p
_SIZE = ctypes.c_size_t


class _Map(ctypes.Structure):
    """std::map: a comparison, and the tree's header with its first and last node."""

    _fields_ = [
        ("compare", _P), ("color", _P), ("root", _P), ("first", _P), ("last", _P), ("count", _SIZE),
    ]  # fmt: skip


class _Node(ctypes.Structure):
    """A node with the key, and with the value, which is a llama_memory_breakdown_data."""

    _fields_ = [
        ("color", _P), ("parent", _P), ("left", _P), ("right", _P),
        ("buft", _P), ("model", _SIZE), ("context", _SIZE), ("compute", _SIZE),
    ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Share:
    """Bytes in buffers of one type: of the model, of the context's memory, and for computing."""

    buft: int
    model: int
    context: int
    compute: int


def breakdown(engine: Engine, context: int) -> list[Share] | None:
    """The account of a llama_context; None where there is none.

    Of a model that was loaded without memory (no_alloc) it is what the engine would have taken.
    """
    try:
        account, _, delete = (engine.find(name) for name in (_ACCOUNT, _NEXT, _DELETE))
    except EngineNotFound:
        return None
    account.restype, account.argtypes = _Map, (_P,)
    delete.restype, delete.argtypes = None, (_P,)
    found = account(context)
    nodes = list(_nodes(found.root))
    if len(nodes) != found.count:
        # not what it is taken for; what it holds is left alone
        return None
    shares = []
    for address in nodes:
        node = _Node.from_address(address)
        shares.append(Share(node.buft, node.model, node.context, node.compute))
    for address in nodes:
        delete(address)
    return shares


def _nodes(address: int | None) -> Iterator[int]:
    if address:
        node = _Node.from_address(address)
        yield from _nodes(node.left)
        yield address
        yield from _nodes(node.right)
