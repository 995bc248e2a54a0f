"""Streams and tensors on a GPU, as far as no GPU is needed: what is accepted, handed on, and refused by name."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import qkv
from conftest import HEADS, LENGTHS, STARTS, DlpackOnly, OnCuda, spec
from qkv.stream import handle_of


class CoreStream:
    """As cuda.core's."""

    def __init__(self, version, handle):
        self.pair = (version, handle)

    def __cuda_stream__(self):
        return self.pair


class EarlyCoreStream:
    __cuda_stream__ = (0, 0x78)


def refusal(call, *arguments, **keywords):
    with pytest.raises(qkv.Error) as caught:
        call(*arguments, **keywords)
    return caught.value


class Torch:
    """What qkv uses of torch, with two GPUs. ``events`` tells what was done on which stream."""

    class Tensor(OnCuda):
        def __init__(self, array, is_cuda=True):
            super().__init__(array)
            self.is_cuda = is_cuda
            self.device = SimpleNamespace(type="cuda", index=1)
            self.shape = array.shape

        def stride(self, axis):
            return self.array.strides[axis] // self.array.itemsize

        def cpu(self):
            Torch.events.append(("cpu", Torch.stream))
            return DlpackOnly(self.array)

    float32 = np.float32
    events: list
    stream: str
    cuda: SimpleNamespace

    @staticmethod
    def zeros(shape, dtype, device):
        Torch.events.append(("zeros", Torch.stream, device.index))
        return Torch.Tensor(np.zeros(shape, dtype))


@contextmanager
def on_stream(stream):
    before, Torch.stream = Torch.stream, stream
    try:
        yield
    finally:
        Torch.stream = before


@pytest.fixture
def torch(monkeypatch):
    Torch.events, Torch.stream = [], "current"
    Torch.cuda = SimpleNamespace(
        is_initialized=lambda: True,
        current_stream=lambda index: SimpleNamespace(cuda_stream=0x1000 + index),
        default_stream=lambda device: f"default of {device.index}",
        ExternalStream=lambda handle, device: f"{handle:#x} of {device.index}",
        stream=on_stream,
    )
    monkeypatch.setitem(sys.modules, "torch", Torch)
    return Torch


@pytest.mark.parametrize(
    ("stream", "handle"),
    [
        (0, 0),
        (0x56, 0x56),
        ((1 << 64) - 1, (1 << 64) - 1),
        (SimpleNamespace(cuda_stream=0x67), 0x67),
        (CoreStream(0, 0x78), 0x78),
        (EarlyCoreStream(), 0x78),
    ],
)
def test_kinds_of_streams(stream, handle):
    assert handle_of(stream, 0) == handle


@pytest.mark.parametrize(
    "wrong",
    [
        -1, 1 << 64, True, 1.0, "0", object(), np.zeros(1), SimpleNamespace(cuda_stream=None),
        SimpleNamespace(cuda_stream=-1), CoreStream(1, 0x78), CoreStream(0, None),
    ],
)  # fmt: skip
def test_what_is_no_stream_is_refused_by_every_call(paged, wrong):
    attention, cache = qkv.Attention(spec()), qkv.KvCache(paged.key_pages, paged.value_pages)
    dense = qkv.Attention(spec(cache=None))
    plan, dense_plan = attention.plan(paged.batch), dense.plan(qkv.Batch(STARTS, LENGTHS))
    new, state = (paged.new_key, paged.new_value), (paged.query, np.zeros((HEADS, STARTS[-1]), np.float32))
    before = paged.key_pages.copy()
    for call, arguments in [
        (attention.plan, (paged.batch,)),
        (attention.update_cache, (*new, cache, plan)),
        (attention.forward, (paged.query, cache, plan)),
        (dense.forward, (paged.query, paged.key, paged.value, dense_plan)),
        (qkv.varlen_attention, (paged.query, paged.key, paged.value, STARTS, LENGTHS)),
        (qkv.merge_states, ([state],)),
        (qkv.cache_write, (*new, cache, paged.slot_mapping)),
        (
            qkv.flash_attn_varlen_func,
            (paged.query, paged.key, paged.value, 5, STARTS, 11, np.cumsum([0, *LENGTHS], dtype=np.int32)),
        ),
    ]:
        error = refusal(call, *arguments, stream=wrong)
        assert (error.code, error.argument) == ("invalid_argument", "stream") and "cuda_stream" in error.allowed
    np.testing.assert_array_equal(paged.key_pages, before)


def test_the_cpu_ignores_streams(paged):
    attention, cache = qkv.Attention(spec()), qkv.KvCache(paged.key_pages, paged.value_pages)
    plan = attention.plan(paged.batch, stream=7)
    attention.update_cache(paged.new_key, paged.new_value, cache, plan, stream=CoreStream(0, 7))
    out = attention.forward(paged.query, cache, plan, stream=SimpleNamespace(cuda_stream=7))
    np.testing.assert_array_equal(attention.forward(paged.query, cache, plan), out)


@pytest.mark.usefixtures("torch")
def test_none_is_the_current_stream_of_torch():
    assert handle_of(None, 0) == 0x1000 and handle_of(None, 1) == 0x1001
    assert handle_of(0, 1) == 0


def test_none_is_the_default_stream_without_torch(torch, monkeypatch):
    torch.cuda.is_initialized = lambda: False
    assert handle_of(None, 1) == 0
    monkeypatch.delitem(sys.modules, "torch")
    assert handle_of(None, 1) == 0


def test_zeros_are_written_on_the_stream_of_the_call(torch):
    like = torch.Tensor(np.zeros(1))
    for stream in (None, 0x56, CoreStream(0, 0x78), 0):
        qkv.array.zeros(like, (2, 3), "f32", stream)
    assert torch.events == [
        ("zeros", "current", 1), ("zeros", "0x56 of 1", 1), ("zeros", "0x78 of 1", 1), ("zeros", "default of 1", 1),
    ]  # fmt: skip
    assert isinstance(qkv.array.zeros(np.zeros(1), (2, 3), "f32", 0x56), np.ndarray)


def test_the_indices_of_a_batch_lie_on_the_host(paged):
    attention = qkv.Attention(spec(mask="causal & kv_pos < end[request]"))
    arrays = {
        "query_start_loc": STARTS,
        "seq_lens": LENGTHS,
        "block_table": paged.block_table,
        "slot_mapping": paged.slot_mapping,
    }
    for name, array in arrays.items():
        batch = qkv.Batch(**(arrays | {name: OnCuda(array)}), mask_operands={"end": LENGTHS})
        error = refusal(attention.plan, batch)
        assert (error.code, error.argument) == ("mismatch", name)
        assert "cuda:1" in error.value and "host" in error.allowed
    error = refusal(attention.plan, qkv.Batch(**arrays, mask_operands={"end": OnCuda(LENGTHS)}))
    assert "end" in error.argument and "cuda:1" in error.value


def test_slots_of_a_single_call_lie_on_the_host(paged):
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    error = refusal(qkv.cache_write, paged.new_key, paged.new_value, cache, OnCuda(paged.slot_mapping))
    assert error.argument == "slot_mapping" and "cuda:1" in error.value


def test_tensors_of_a_layer_lie_on_its_device(paged):
    attention, cache = qkv.Attention(spec()), qkv.KvCache(paged.key_pages, paged.value_pages)
    plan = attention.plan(paged.batch)
    error = refusal(attention.forward, OnCuda(paged.query), cache, plan)
    assert error.argument == "query" and "cuda:1" in error.value and "cpu" in error.allowed
    error = refusal(attention.forward, paged.query, cache, plan, OnCuda(paged.query))
    assert error.argument == "out"


def test_tensors_on_a_gpu_make_no_other_stream_wait(paged):
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    key = OnCuda(paged.new_key)
    refusal(qkv.cache_write, key, paged.new_value, cache, paged.slot_mapping)
    assert [call["stream"] for call in key.calls] == [-1]


def test_tensors_of_producers_from_before_versions_are_imported(paged):
    class Early(OnCuda):
        def __dlpack__(self, stream=None):
            return super().__dlpack__(stream=stream)

    key = Early(paged.new_key)
    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    assert "cuda:1" in refusal(qkv.cache_write, key, paged.new_value, cache, paged.slot_mapping).value
    assert key.calls == [{"stream": -1}]


def test_what_a_producer_refuses_is_said(paged):
    class Refusing(OnCuda):
        def __dlpack__(self, **keywords):
            raise BufferError("another device is current")

    cache = qkv.KvCache(paged.key_pages, paged.value_pages)
    error = refusal(qkv.cache_write, Refusing(paged.new_key), paged.new_value, cache, paged.slot_mapping)
    assert error.argument == "key" and "another device is current" in error.value


def test_flash_attn_copies_indices_to_the_host_after_the_work_on_the_stream(torch, paged):
    key_starts = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    q, k, v, starts, ends = map(torch.Tensor, (paged.query, paged.key, paged.value, STARTS, key_starts))
    flags = torch.Tensor(np.ones(len(LENGTHS), np.int32))
    # Float32 queries are refused on a GPU, before anything is launched.
    error = refusal(
        qkv.flash_attn_varlen_func,
        q,
        k,
        v,
        5,
        starts,
        11,
        ends,
        dynamic_causal=flags,
        return_softmax_lse=True,
        stream=0x56,
    )
    assert (error.code, error.argument) == ("unsupported", "query_dtype")
    assert [what for what, *_ in torch.events] == ["cpu", "cpu", "cpu", "zeros", "zeros"]
    assert {stream for _, stream, *_ in torch.events} == {"0x56 of 1"} and torch.stream == "current"


def test_flash_attn_refuses_other_arrays_of_a_gpu_by_name(paged):
    key_starts = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32)
    error = refusal(qkv.flash_attn_varlen_func, paged.query, paged.key, paged.value, 5, OnCuda(STARTS), 11, key_starts)
    assert error.argument == "cu_seqlens_q" and "host" in error.allowed
