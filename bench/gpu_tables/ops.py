"""The small calls, in GB/s of bytes read and written, against a device-to-device copy of as many bytes."""

import numpy as np
import qkv
import torch

from gpu_tables.layers import Heads, Layer, make_plan, views_of

HEADS, PAGE = Heads(32, 8, 128), 16
TOKENS, MERGE_TOKENS = 65536, 16384


def cases(_):
    writes = [("cache write", TOKENS, dtype) for dtype in ("bfloat16", "float32")]
    merges = [(f"merge {n}", MERGE_TOKENS, dtype) for n in (2, 4) for dtype in ("float32", "bfloat16")]
    return writes + merges


def rehearsal_cases(_):
    return [("cache write", 64, "float32"), ("merge 2", 32, "bfloat16")]


def kinds(case):
    return [Layer(HEADS, "causal", PAGE)] if case[0] == "cache write" else []


def run(bench, case):
    name, tokens, dtype = case
    make = cache_write if name == "cache write" else merge
    call, num_bytes = make(bench, case, getattr(torch, dtype))
    add_row(bench, f"{name} {tokens} tokens {HEADS if name == 'cache write' else 'h32 d128'} {dtype}", call, num_bytes)


def add_row(bench, case, call, num_bytes):
    """Of a call that reads and writes so many bytes, beside a copy of as many."""
    half = torch.empty(num_bytes // 2, dtype=torch.uint8, device=bench.device)
    other = torch.empty_like(half)
    time = bench.timer.graph([call], launches=5)
    copy = bench.timer.graph([lambda: other.copy_(half)], launches=5)
    bench.report.add(
        case,
        "GB/s",
        1e-9 * num_bytes / time.seconds,
        limit=1e-9 * num_bytes / copy.seconds,
        note=f"{time.seconds * 1e6:.1f} us",
        microseconds={"qkv": time.seconds * 1e6, "copy": copy.seconds * 1e6},
    )


def cache_write(bench, case, dtype):
    """New tokens of any float type into bf16 pages in random order."""
    _, tokens, _ = case
    attention = bench.layers[kinds(case)[0]]
    plan, num_pages = write_plan(attention, tokens)
    key, value = (bench.random(tokens, HEADS.kv, HEADS.dim).to(dtype) for _ in range(2))
    both = torch.empty(num_pages, PAGE, HEADS.kv, 2 * HEADS.dim, dtype=torch.bfloat16, device=bench.device)
    cache = qkv.KvCache(*views_of(both, HEADS))
    num_bytes = 2 * key.numel() * (key.element_size() + 2)
    return lambda: attention.update_cache(key, value, cache, plan), num_bytes


def write_plan(attention, tokens):
    """One request's new tokens into pages of PAGE in random order, and how many."""
    pages = np.random.default_rng(4).permutation(tokens // PAGE)
    slots = (pages[:, None] * PAGE + np.arange(PAGE)).reshape(-1).astype(np.int64)
    return make_plan(attention, [(tokens, tokens)], pages=pages.astype(np.int32), slots=slots), len(pages)


def merge(bench, case, dtype):
    name, tokens, _ = case
    num_states = int(name.split()[1])
    states = [
        (bench.random(tokens, 32, 128).to(dtype), torch.randn(32, tokens, device=bench.device))
        for _ in range(num_states)
    ]
    out, lse = torch.empty_like(states[0][0]), torch.empty_like(states[0][1])
    num_bytes = (num_states + 1) * (out.numel() * out.element_size() + lse.numel() * 4)
    return lambda: qkv.merge_states(states, out, lse), num_bytes
