"""The check of the loaded engine: it passes, covers every slot, and tells any difference."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from caravan import engine
from caravan.engine import layouts, verify
from caravan.engine.llama import ContextParams2, ContextParams3
from caravan.engine.probe import STEPS, TENSOR_STEPS, Probe
from caravan.errors import AbiMismatch


@pytest.fixture
def pretended():
    """The loaded engine, of which a test may pretend something else."""
    loaded = engine.load()
    names = ("ggml", "llama", "find", "version", "api_version", "layouts", "path")
    return SimpleNamespace(**{name: getattr(loaded, name) for name in names})


def swapped(interface: str, one: str, other: str) -> layouts.Layouts:
    """The engine's layouts with two slots in each other's place."""
    slots = dict(engine.load().layouts.slots)
    names = [{one: other, other: one}.get(name, name) for name in slots[interface]]
    slots[interface] = {name: slots[interface][name] for name in names}
    struct = {"buffer_type": "BufferType", "reg": "Reg", "device": "Device", "backend": "Backend"}
    base = layouts.for_api(engine.load().api_version)
    iface = layouts._interface("iface", slots[interface])
    if interface == "buffer":
        fields = [(n, iface if n == "iface" else t) for n, t in base.Buffer._fields_]
        buffer = layouts._struct("Buffer", *fields)
        return dataclasses.replace(base, slots=slots, Buffer=buffer, BufferInterface=iface)
    old = getattr(base, struct[interface])
    fields = [(n, iface if n == "iface" else t) for n, t in old._fields_]
    return dataclasses.replace(
        base, slots=slots, **{struct[interface]: layouts._struct(interface, *fields)}
    )


def test_loaded_engine_passes(pretended):
    verify.check(pretended)


def test_every_slot_is_reached_or_known_to_be_out_of_reach():
    loaded = engine.load()
    reached = {slot for slot, *_ in (*STEPS, *TENSOR_STEPS)}
    assert Probe(loaded.find, loaded.layouts).slots() - reached == verify.UNREACHABLE


@pytest.mark.parametrize(
    ("interface", "one", "other"),
    [
        ("reg", "get_name", "get_device"),
        ("device", "get_name", "get_description"),
        ("device", "supports_op", "supports_buft"),
        ("device", "event_free", "event_synchronize"),
        ("buffer_type", "get_alignment", "get_max_size"),
        ("buffer", "set_tensor", "get_tensor"),
        ("buffer", "clear", "reset"),
        ("buffer", "set_tensor_2d", "get_tensor_2d"),
        ("backend", "graph_compute", "event_record"),
        ("backend", "set_tensor_async", "get_tensor_async"),
        ("backend", "cpy_tensor_async", "synchronize"),
    ],
)
def test_a_slot_elsewhere_is_told_by_name(pretended, interface, one, other):
    pretended.layouts = swapped(interface, one, other)
    with pytest.raises(
        AbiMismatch, match=rf"what ggml_\w+ calls is \['{interface}\.({one}|{other})"
    ):
        verify.check(pretended)


def test_layouts_of_another_version_are_told(pretended):
    other = {2: 3, 3: 2}[pretended.api_version]
    pretended.layouts = layouts.for_api(other)
    with pytest.raises(AbiMismatch, match=r"buffer type's device|buft"):
        verify.check(pretended)


def test_parameters_of_another_version_are_told(pretended):
    other = {2: ContextParams3, 3: ContextParams2}[pretended.api_version]
    pretended.llama = SimpleNamespace(
        ContextParams=other,
        context_default_params=other,
        model_default_params=pretended.llama.model_default_params,
    )
    with pytest.raises(
        AbiMismatch, match=r"llama_context_default_params is|default .* of a context"
    ):
        verify.check(pretended)


def test_message_names_what_was_found_and_what_is_supported(pretended, monkeypatch):
    names = ("NONE", "NEW", *layouts.OP_NAMES[1:])
    monkeypatch.setattr(layouts, "OP_NAMES", names)
    with pytest.raises(AbiMismatch) as caught:
        verify.check(pretended)
    assert str(caught.value) == (
        f"the engine at {pretended.path} (ggml {pretended.version}, backend API"
        f" {pretended.api_version}) is not one that Caravan knows: op 1 is b'DUP', not b'NEW';"
        f" it knows {verify.SUPPORTED}"
    )


def test_a_type_of_another_size_is_told(pretended, monkeypatch):
    sizes = layouts.TYPE_BYTES.copy()
    sizes[12] += 1
    monkeypatch.setattr(layouts, "TYPE_BYTES", sizes)
    with pytest.raises(AbiMismatch, match=r"type 12 is \(256, 144\), not \(256, 145\)"):
        verify.check(pretended)


def test_a_changed_default_is_told(pretended, monkeypatch):
    monkeypatch.setitem(verify._CONTEXT_DEFAULTS, "n_ubatch", 256)
    with pytest.raises(AbiMismatch, match="default n_ubatch of a context is 512, not 256"):
        verify.check(pretended)


def test_a_function_that_is_gone_is_told(pretended):
    find = pretended.find
    pretended.find = lambda symbol: find(symbol.replace("ggml_backend_guid", "ggml_no_guid"))
    with pytest.raises(AbiMismatch, match="does not export ggml_no_guid"):
        verify.check(pretended)
