"""Decode steps whose requests share their first keys, 512 of their own behind them: sharing off, automatic and always,
in a CUDA graph over as many caches as fit, of bf16 and, last, of e4m3. GB/s count the keys and values of every request,
as if each read its own: what sharing saves is the ratio to "off"."""

import numpy as np
import qkv
import torch

from gpu_tables.layers import FINITE_BITS, Heads, Layer, views_of

HEADS, PAGE, OWN = Heads(32, 8, 128), 16, 512
SHARINGS = ["off", "automatic", "always"]
LAUNCHES = 20


def name_of(requests, groups):
    shared = " + ".join(f"{tokens} of {len(members)}" for members, tokens in groups)
    return f"{requests} x ({shared}, {OWN} own)"


def batch_of(requests, tokens):
    return requests, [(list(range(requests)), tokens)]


# 4k of all, 4k of each half; the outer group alone is the batch without its nested ones.
OUTER = [(list(range(64)), 4096)]
HALVES = [(list(range(32)), 8192), (list(range(32, 64)), 8192)]


def cases(_):
    for tokens in (512, 4096, 8192, 32768):
        for requests in (1, 8, 64, 256):
            requests, groups = batch_of(requests, tokens)
            yield name_of(requests, groups), requests, groups, tokens + OWN, "bf16"
    yield name_of(64, OUTER + HALVES), 64, OUTER + HALVES, 8192 + OWN, "bf16"
    yield name_of(64, OUTER) + ", 4096 more own", 64, OUTER, 8192 + OWN, "bf16"
    for requests, tokens in ((64, 8192), (256, 4096)):
        requests, groups = batch_of(requests, tokens)
        yield name_of(requests, groups), requests, groups, tokens + OWN, "f8e4m3"


def rehearsal_cases(_):
    requests, groups = batch_of(3, 512)
    for dtype in ("bf16", "f8e4m3"):
        yield name_of(requests, groups), requests, groups, 512 + OWN, dtype


def kinds(case):
    dtype = case[-1]
    return [Layer(HEADS, "causal", PAGE, kv_dtype=dtype, scales="none" if dtype == "bf16" else "per_head")]


def cache_of(memory, dtype):
    """Of 8 bits: the front half of each row's bytes, without those that are NaN."""
    if dtype == "bf16":
        return qkv.KvCache(*views_of(memory, HEADS))
    elements = memory.view(torch.uint8).bitwise_and_(FINITE_BITS).view(torch.float8_e4m3fn)
    scale = torch.linspace(0.03, 0.09, HEADS.kv, device=memory.device)
    key, value = views_of(elements[..., : HEADS.dim + HEADS.value_dim], HEADS)
    return qkv.KvCache(key, value, key_scale=scale, value_scale=scale)


def shared_table(requests, groups, keys):
    """The block table, and how many pages it names."""
    width = keys // PAGE
    table = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
    for members, tokens in groups:
        table[members, : tokens // PAGE] = table[members[0], : tokens // PAGE]
    numbers, table = np.unique(table, return_inverse=True)
    order = np.random.default_rng(4).permutation(len(numbers)).astype(np.int32)
    return order[table].reshape(requests, width), len(numbers)


def run(bench, case):
    name, requests, groups, keys, dtype = case
    attention = bench.layers[kinds(case)[0]]
    table, total_pages = shared_table(requests, groups, keys)
    caches = bench.pool.caches(HEADS, PAGE, total_pages, most=LAUNCHES)
    query = bench.random(requests, HEADS.query, HEADS.dim)
    gigabytes = 1e-9 * requests * keys * HEADS.bytes_a_token * (1 if dtype == "bf16" else 0.5)
    kv_caches = [cache_of(memory, dtype) for memory in caches]

    def seconds_of(sharing):
        plan = attention.plan(
            qkv.Batch(
                query_start_loc=np.arange(requests + 1, dtype=np.int32),
                seq_lens=np.full(requests, keys, np.int32),
                block_table=table,
                prefix_groups=groups if requests > 1 else [],
                prefix_sharing=sharing,
            )
        )
        out = torch.empty(requests, HEADS.query, HEADS.value_dim, dtype=query.dtype, device=query.device)
        calls = [lambda kv_cache=kv_cache: attention.forward(query, kv_cache, plan, out) for kv_cache in kv_caches]
        return bench.timer.graph(calls, LAUNCHES).seconds, out

    results = {sharing: seconds_of(sharing) for sharing in SHARINGS}
    for sharing in SHARINGS[1:]:
        if not torch.equal(results[sharing][1], results["off"][1]):
            raise AssertionError(f"prefix_sharing {sharing} has other bits than off")
    micros = {sharing: 1e6 * seconds for sharing, (seconds, _) in results.items()}
    best = min(micros["off"], micros["always"])
    bench.report.add(
        f"prefixes {name}" + (f" {dtype}" if dtype != "bf16" else ""),
        "GB/s",
        1e6 * gigabytes / micros["automatic"],
        {sharing: 1e6 * gigabytes / micros[sharing] for sharing in ("off", "always")},
        note=", ".join(f"{sharing} {time:.1f} us" for sharing, time in micros.items())
        + f"; automatic {100 * (micros['automatic'] / best - 1):+.1f} % over the better",
        microseconds=micros,
    )
