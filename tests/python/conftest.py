"""A small paged batch that the tests share: prefill, decode, and a request without new tokens."""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import qkv

HEADS, KV_HEADS, DIM, PAGE = 6, 2, 16, 4
STARTS = np.array([0, 5, 6, 6, 9], np.int32)
LENGTHS = np.array([5, 11, 3, 9], np.int32)


@dataclass
class Paged:
    """Dense keys and values of all requests, and the pages that hold all but the new tokens'."""

    query: np.ndarray
    key: np.ndarray  # [sum of lengths, ...]
    value: np.ndarray
    new_key: np.ndarray  # [num_tokens, ...]
    new_value: np.ndarray
    key_pages: np.ndarray
    value_pages: np.ndarray
    batch: qkv.Batch
    block_table: np.ndarray
    slot_mapping: np.ndarray


def spec(**changes):
    fields = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM, "cache": qkv.CacheSpec(page_size=PAGE)}
    return qkv.LayerSpec(**(fields | changes))


def make_paged(dtype=np.float32, make_pages=np.full):
    rng = np.random.default_rng(7)
    query = rng.standard_normal((STARTS[-1], HEADS, DIM)).astype(dtype)
    key, value = (rng.standard_normal((LENGTHS.sum(), KV_HEADS, DIM)).astype(dtype) for _ in range(2))
    num_pages, max_pages = 16, 3
    # Pages hold NaN, so that whatever is read outside a request's own tokens shows.
    key_pages = make_pages((num_pages, PAGE, KV_HEADS, DIM), np.nan, dtype)
    value_pages = make_pages((num_pages, PAGE, KV_HEADS, DIM), np.nan, dtype)
    block_table = rng.permutation(num_pages)[: len(LENGTHS) * max_pages].reshape(-1, max_pages).astype(np.int32)
    slots, new, first = [], [], 0
    for r, length in enumerate(LENGTHS):
        num_new = STARTS[r + 1] - STARTS[r]
        for position in range(length):
            page, offset = block_table[r, position // PAGE], position % PAGE
            if position < length - num_new:
                key_pages[page, offset], value_pages[page, offset] = key[first + position], value[first + position]
            else:
                slots.append(page * PAGE + offset)
                new.append(first + position)
        first += length
    slot_mapping = np.array(slots, np.int64)
    batch = qkv.Batch(STARTS, LENGTHS, block_table, slot_mapping)
    return Paged(query, key, value, key[new], value[new], key_pages, value_pages, batch, block_table, slot_mapping)


@pytest.fixture
def paged():
    return make_paged()


class DlpackOnly:
    """A tensor of some other framework: nothing but the two DLPack methods."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **kwargs):
        return self.array.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class OnCuda(DlpackOnly):
    """Says that it lies on cuda:1, for what must not touch it. ``calls`` are the keywords that __dlpack__ got."""

    def __init__(self, array):
        super().__init__(array)
        self.calls = []

    def __dlpack__(self, **keywords):
        self.calls.append(keywords)
        capsule = self.array.__dlpack__()
        pointer_in = ctypes.pythonapi.PyCapsule_GetPointer
        pointer_in.restype, pointer_in.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
        # DLTensor begins with the address, the kind of device, and its index.
        (ctypes.c_int32 * 2).from_address(pointer_in(capsule, b"dltensor") + 8)[:] = 2, 1
        return capsule

    def __dlpack_device__(self):
        return 2, 1
