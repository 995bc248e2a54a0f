"""Decode: one new token a request, caches in pages, a CUDA graph of 20 launches or more over as many caches as fit,
so that keys and values come from memory. GB/s count each key and value once; the limit reads the same pages only.
FlashInfer reads the same pages, the better of its two kernels; the other peers read dense keys."""

import numpy as np
import qkv
import torch

from gpu_tables.flash_infer import own_layout
from gpu_tables.layers import Heads, Layer, make_plan, num_pages, views_of

HEADS = [Heads(32, 8, 128), Heads(64, 8, 64)]
GROUPED = [Heads(8, 8, 128), Heads(64, 8, 128), Heads(128, 8, 128)]
PAGES = [16, 64]
BATCHES = {
    "1x1k": [1024],
    "1x8k": [8192],
    "1x64k": [65536],
    "16x8k": [8192] * 16,
    "64x4k": [4096] * 64,
    "256x1k": [1024] * 256,
    "128x8k": [8192] * 128,
    "1x64k+255x512": [65536] + [512] * 255,
}
GROUPED_BATCH = "64x4k"
FROM_MEMORY_BYTES = 512 << 20  # what a graph reads at least: several times any L2


def cases(_):
    for heads in HEADS:
        for page in PAGES:
            yield from ((heads, page, name, BATCHES[name]) for name in BATCHES)
    yield from ((heads, 16, GROUPED_BATCH, BATCHES[GROUPED_BATCH]) for heads in GROUPED)


def rehearsal_cases(_):
    yield Heads(4, 2, 64), 16, "2x64", [64, 64]
    yield Heads(4, 2, 64), 16, "64+32", [64, 32]


def kinds(case):
    heads, page, _, _ = case
    return [Layer(heads, "causal", page)]


def run(bench, case):
    heads, page, name, keys = case
    attention = bench.layers[kinds(case)[0]]
    lengths = [(1, length) for length in keys]
    total_pages = num_pages(lengths, page)
    order = np.random.default_rng(2).permutation(total_pages).astype(np.int32)
    plan = make_plan(attention, lengths, pages=order)
    gigabytes = 1e-9 * sum(keys) * heads.bytes_a_token
    launches = launches_from_memory(bench, gigabytes)
    caches = bench.pool.caches(heads, page, total_pages, most=launches)
    query = bench.random(len(keys), heads.query, heads.dim)
    out = torch.empty(len(keys), heads.query, heads.value_dim, dtype=query.dtype, device=query.device)

    def call_of(cache):
        kv_cache = qkv.KvCache(*views_of(cache, heads))
        return lambda: attention.forward(query, kv_cache, plan, out)

    times = {"qkv": bench.timer.graph([call_of(cache) for cache in caches], launches)}
    if bench.page_reader is not None:
        pages = torch.from_numpy(order).to(query.device)
        times["loads"] = bench.timer.graph([bench.page_reader.call(cache, pages) for cache in caches], launches)
    peers = peer_times(bench, heads, keys, query, caches, launches) if len(set(keys)) == 1 else {}

    def check(name, got, cache):
        attention.forward(query, qkv.KvCache(*own_layout(cache, heads).unbind(1)), plan, out)
        bench.expect_close(name, got, out)

    choices = flash_infer_times(bench, heads, page, lengths, order, query, caches, launches, check)
    if choices:
        peers["FlashInfer"] = min(choices.values(), key=lambda time: time.seconds)

    micros = {name: time.seconds * 1e6 for name, time in (times | peers | choices).items()}
    rates = {name: gigabytes / time.seconds for name, time in (times | peers).items()}
    limit = rates.get("loads")
    bench.report.add(
        f"decode {name} {heads} page{page}",
        "GB/s",
        rates["qkv"],
        {name: rates[name] for name in peers},
        limit=limit,
        note=f"{micros['qkv']:.2f} us" + (f", loads {micros['loads']:.2f}" if limit else ""),
        microseconds=micros,
        num_caches=len(caches),
    )


def launches_from_memory(bench, gigabytes):
    """Of a graph that reads so much a launch."""
    return max(20, int(1e-9 * FROM_MEMORY_BYTES / gigabytes)) if bench.on_gpu else 2


def peer_times(bench, heads, keys, query, caches, launches):
    """Peers read dense caches, their best case: the same memory, seen as [kv heads, tokens, dim] of each request."""
    times = {}
    for name, make in bench.peers.items():
        try:
            calls = []
            for cache in caches:
                key, value = dense_views(cache, heads, len(keys), keys[0])
                calls.append(make(query.unsqueeze(1), key, value, False))
            times[name] = bench.timer.graph(calls, launches)
        except Exception as error:  # of many kinds: what the peer does not do
            bench.report.leave_out(f"{name} in decode of {heads}", error)
    return times


def flash_infer_times(bench, heads, page, lengths, order, query, caches, launches, check):
    """From the same pages in its own layout; which cores to use is its user's choice."""
    if bench.flash_infer is None:
        return {}
    out = torch.empty_like(query)

    def measure(name, tensor_cores):
        wrapper = bench.flash_infer.decode(heads, page, lengths, order, tensor_cores=tensor_cores)
        own_caches = [own_layout(cache, heads) for cache in caches]
        calls = [lambda cache=cache: wrapper.run(query, cache, out=out) for cache in own_caches]
        calls[0]()
        check(name, out, caches[0])
        return bench.timer.graph(calls, launches)

    times = {}
    for name, tensor_cores in (("FlashInfer, tensor cores", True), ("FlashInfer, CUDA cores", False)):
        try:
            times[name] = measure(name, tensor_cores)
        except Exception as error:  # of many kinds: what the peer does not do
            bench.report.leave_out(f"{name}, in decode of {heads}", error)
    return times


def dense_views(cache, heads, requests, length):
    """Key and value [requests, tokens, kv heads, dim] such that .transpose(1, 2) is contiguous."""
    flat, split = cache.view(-1), requests * length * heads.kv * heads.dim
    key, value = flat[:split], flat[split : split + requests * length * heads.kv * heads.value_dim]
    return (part.view(requests, heads.kv, length, -1).transpose(1, 2) for part in (key, value))
