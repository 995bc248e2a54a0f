"""Layers, batches and caches of the tables: torch tensors in, calls of qkv out."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import qkv
import torch

FINITE_BITS = 0xB7  # of random bytes as e4m3: magnitudes below 2, no NaN


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int
    dim_v: int = 0  # 0: as dim

    @property
    def value_dim(self):
        return self.dim_v or self.dim

    @property
    def bytes_a_token(self):
        """Of keys and values in 16 bits."""
        return 2 * self.kv * (self.dim + self.value_dim)

    def __str__(self):
        dims = f"d{self.dim}" + (f"/{self.dim_v}" if self.value_dim != self.dim else "")
        return f"{dims} h{self.query}/{self.kv}"


@dataclass(frozen=True)
class Layer:
    """A kind of layer, as a key: the tables list theirs, and all are compiled before anything is timed."""

    heads: Heads
    mask: str = "causal"
    page: int = 0  # 0: dense keys
    query_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    scales: str = "none"

    def spec(self):
        return qkv.LayerSpec(
            num_q_heads=self.heads.query,
            num_kv_heads=self.heads.kv,
            head_dim=self.heads.dim,
            head_dim_v=self.heads.dim_v,
            query_dtype=self.query_dtype,
            kv_dtype=self.kv_dtype,
            kv_scales=self.scales,
            cache=qkv.CacheSpec(page_size=self.page) if self.page else None,
            mask=self.mask,
        )


class Layers:
    """Attention objects by kind, each made once."""

    def __init__(self, device):
        self.device = device
        self.made = {}

    def compile(self, kinds, threads, progress):
        """Makes all kinds, several at a time: a kernel compiles on one core."""
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in self.made]
        with ThreadPoolExecutor(threads) as pool:
            for kind, made in zip(missing, pool.map(self._make, missing), strict=True):
                self.made[kind] = made
                progress(str(kind.heads))

    def __getitem__(self, kind):
        if kind not in self.made:
            self.made[kind] = self._make(kind)
        return self.made[kind]

    def _make(self, kind):
        return qkv.Attention(kind.spec(), self.device)


def make_plan(attention, lengths, pages=None, slots=None, operands=None):
    """lengths: (new tokens, keys) of each request. pages: the page numbers of all requests in a row."""
    starts = np.cumsum([0] + [new for new, _ in lengths]).astype(np.int32)
    keys = np.array([length for _, length in lengths], np.int32)
    arguments = {"query_start_loc": starts, "seq_lens": keys, "mask_operands": operands or {}}
    if pages is not None:
        page = attention.spec.cache.page_size
        counts = -(-keys // page)
        table = np.zeros((len(lengths), counts.max()), np.int32)
        table[np.arange(table.shape[1]) < counts[:, None]] = pages
        arguments["block_table"] = table
    if slots is not None:
        arguments["slot_mapping"] = slots
    return attention.plan(qkv.Batch(**arguments))


def num_pages(lengths, page):
    return sum(-(-keys // page) for _, keys in lengths)


def in_pages(tensor, order, page):
    """[requests, tokens, ...], of whole pages, as pages [.., page, ...]: the i-th lies at order[i]."""
    pages = torch.empty(len(order), page, *tensor.shape[2:], dtype=tensor.dtype, device=tensor.device)
    pages[torch.from_numpy(order).long().to(tensor.device)] = tensor.reshape(pages.shape)
    return pages


class Pool:
    """Random memory that stands for caches: cut anew for each case, so that making it is paid once."""

    def __init__(self, device, num_bytes):
        self.memory = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
        for part in self.memory.split(1 << 28):
            part.normal_()

    def caches(self, heads, page, pages_each, most=20):
        """As many caches, one behind another, as fit; a token's key and value side by side:
        [pages, page, kv heads, dim + dim_v]."""
        size = pages_each * page * heads.bytes_a_token // 2
        count = min(most, self.memory.numel() // size)
        if count == 0:
            raise MemoryError(f"a cache of {2e-9 * size:.1f} GB, the pool has {2e-9 * self.memory.numel():.1f} GB")
        shape = (pages_each, page, heads.kv, heads.dim + heads.value_dim)
        return [self.memory[i * size : (i + 1) * size].view(shape) for i in range(count)]


def views_of(cache, heads):
    """(key, value) of a cache of Pool's."""
    return cache[..., : heads.dim], cache[..., heads.dim :]


def visible_pairs(new, keys, causal):
    """(query, key) pairs of a request whose new tokens are its last."""
    return new * keys - (new * (new - 1) // 2 if causal else 0)
