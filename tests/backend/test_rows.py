"""The 2-d slots: rows written and read with gaps between them, through the engine's functions."""

from __future__ import annotations

import ctypes

import pytest

import caravan
from caravan import engine
from caravan.engine import layouts

ROWS, COLUMNS = 300, 40  # f32: rows of 160 bytes, the first 100 of which are used
SIZE, STRIDE, OFFSET = 100, 160, 12


@pytest.fixture(scope="module")
def endpoints():
    with (
        caravan.LocalWorkers(1, threads=1) as new,
        caravan.Worker("CPU:1", options=("--protocol", "7")) as old,
    ):
        yield {8: new.endpoints[0], 7: old.endpoint}


@pytest.fixture(params=[(8, True), (8, False), (7, False)], ids=["ext", "base 8", "base 7"])
def device(request, endpoints):
    protocol, extension = request.param
    with caravan.connect([endpoints[protocol]], extension=extension) as cluster:
        (found,) = cluster.devices
        assert (found.link.version.major, found.link.extension) == (protocol, extension)
        yield found


@pytest.fixture
def tensor(device):
    ggml = engine.load().ggml
    size = ROWS * COLUMNS * 4
    buffer = ggml.buft_alloc_buffer(device.buffer_type, size)
    context = ggml.init(layouts.InitParams(1 << 16, None, True))
    made = ggml.new_tensor_4d(context, 0, COLUMNS, ROWS, 1, 1)
    ctypes.c_uint64.from_address(made + layouts.TENSOR_AT["buffer"]).value = buffer
    base = ggml.buffer_get_base(buffer)
    ctypes.c_uint64.from_address(made + layouts.TENSOR_AT["data"]).value = base
    ggml.buffer_clear(buffer, 7)
    yield made
    ggml.buffer_free(buffer)
    ggml.free(context)


def call(name, *arguments):
    function = engine.load().find(f"ggml_backend_tensor_{name}")
    function.restype = None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_size_t] * 5)
    function(*arguments)


def whole(tensor):
    data = ctypes.create_string_buffer(ROWS * COLUMNS * 4)
    engine.load().ggml.backend_tensor_get(tensor, ctypes.addressof(data), 0, len(data))
    return data.raw


@pytest.mark.parametrize("gap", [0, 28], ids=["packed", "with gaps"])
def test_rows_are_written_where_they_belong_and_read_from_there(tensor, gap):
    there = SIZE + gap
    pattern = bytes(range(251)) * (ROWS * there // 251 + 1)
    data = ctypes.create_string_buffer(pattern[: ROWS * there], ROWS * there)
    call("set_2d", tensor, ctypes.addressof(data), OFFSET, SIZE, ROWS, STRIDE, there)
    expected = bytearray(b"\7" * (ROWS * STRIDE))
    for i in range(ROWS):
        start = i * STRIDE + OFFSET
        expected[start : start + SIZE] = data.raw[i * there : i * there + SIZE]
    assert whole(tensor) == expected
    back = ctypes.create_string_buffer(b"\xee" * (ROWS * there), ROWS * there)
    call("get_2d", tensor, ctypes.addressof(back), OFFSET, SIZE, ROWS, STRIDE, there)
    for i in range(ROWS):
        row = back.raw[i * there : (i + 1) * there]
        assert row == data.raw[i * there : i * there + SIZE] + b"\xee" * gap


def test_reading_rows_does_not_wait_for_each(device, tensor):
    """One command where there is one; otherwise all are on their way before the first is waited
    for."""
    stream = device.link.stream
    commands, segments = stream.commands, stream.segments
    back = ctypes.create_string_buffer(ROWS * SIZE)
    call("get_2d", tensor, ctypes.addressof(back), 0, SIZE, ROWS, STRIDE, SIZE)
    one = device.link.version.major == 8 and not device.link.extension
    assert stream.commands - commands == (1 if one else ROWS)
    assert back.raw == b"\7" * (ROWS * SIZE)
    assert stream.segments - segments <= 1 + ROWS


def test_a_lost_device_gives_zeros(device, tensor):
    device.link.stream.fail(caravan.CaravanError("gone"), "test")
    back = ctypes.create_string_buffer(b"\xee" * (ROWS * SIZE), ROWS * SIZE)
    call("get_2d", tensor, ctypes.addressof(back), 0, SIZE, ROWS, STRIDE, SIZE)
    assert back.raw == bytes(ROWS * SIZE)
    call("set_2d", tensor, ctypes.addressof(back), 0, SIZE, ROWS, STRIDE, SIZE)
