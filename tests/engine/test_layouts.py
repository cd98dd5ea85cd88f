"""The layouts: sizes and offsets as in ggml's headers, whatever platform the tests run on."""

from __future__ import annotations

import ctypes

import pytest

from caravan.engine import layouts
from caravan.engine.llama import Batch, ContextParams2, ContextParams3, ModelParams
from caravan.errors import AbiMismatch


def test_array_structs_have_ggmls_offsets():
    assert layouts.GGML_TENSOR.itemsize == 336
    assert layouts.TENSOR_AT["op_params"] == 84
    assert layouts.TENSOR_AT["src"] == 152
    assert layouts.TENSOR_AT["name"] == 256
    assert layouts.CGRAPH.itemsize == 96
    assert layouts.CGRAPH_AT["uid"] == 88


@pytest.mark.parametrize(("api", "interface", "whole"), [(2, 48, 64), (3, 64, 80)])
def test_buffer_types_grew_between_the_versions(api, interface, whole):
    tables = layouts.for_api(api)
    assert tables.BufferType.device.offset == interface
    assert ctypes.sizeof(tables.BufferType) == whole


@pytest.mark.parametrize("api", layouts.SUPPORTED_APIS)
def test_other_structs_are_the_same_in_all_versions(api):
    tables = layouts.for_api(api)
    sizes = [ctypes.sizeof(s) for s in (tables.Buffer, tables.Backend, tables.Device, tables.Reg)]
    assert sizes == [120, 152, 136, 48]
    assert ctypes.sizeof(layouts.DeviceProps) == 56
    assert ctypes.sizeof(layouts.InitParams) == 24
    assert ctypes.sizeof(layouts.Event) == 16


@pytest.mark.parametrize("api", [0, 1, 4])
def test_unknown_version_is_refused_with_those_that_are_known(api):
    with pytest.raises(AbiMismatch, match=f"version {api}; .* knows 2 and 3"):
        layouts.for_api(api)


def test_parameter_structs_have_llamas_sizes():
    assert ctypes.sizeof(ModelParams) == 80
    assert ctypes.sizeof(ContextParams3) == ctypes.sizeof(ContextParams2) + 8
    assert ContextParams3.moe_cache_size.offset == ContextParams2.abort_callback.offset
    assert ctypes.sizeof(Batch) == 56


def test_tables_cover_every_op_and_type():
    assert len(layouts.OP_NAMES) == len(set(layouts.OP_NAMES)) == 101
    assert len(layouts.TYPE_BLOCK) == len(layouts.TYPE_BYTES) == layouts.TYPE_COUNT
    removed = [number for number in range(layouts.TYPE_COUNT) if not layouts.TYPE_BLOCK[number]]
    assert removed == [4, 5, 31, 32, 33, 36, 37, 38]


def test_slots_take_functions_and_addresses():
    tables = layouts.for_api(3)
    reg = tables.Reg()
    function = tables.interface("reg")["get_device_count"](lambda reg: 3)
    layouts.set_slot(reg.iface, "get_device_count", function)
    address = layouts.slot_address(reg.iface, "get_device_count")
    assert tables.interface("reg")["get_device_count"](address)(None) == 3
    assert layouts.slot_address(reg.iface, "get_name") == 0
    layouts.set_slot(reg.iface, "get_name", 0x1230)
    assert layouts.slot_address(reg.iface, "get_name") == 0x1230
