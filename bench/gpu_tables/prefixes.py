"""Decode steps whose requests share their first keys, 512 of their own behind them: sharing off, automatic and always,
in a CUDA graph over as many caches as fit. GB/s count the keys and values of every request, as if each read its own:
what sharing saves is the ratio to "off"."""

import numpy as np
import qkv
import torch

from gpu_tables.layers import Heads, Layer, views_of

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
            yield name_of(requests, groups), requests, groups, tokens + OWN
    yield name_of(64, OUTER + HALVES), 64, OUTER + HALVES, 8192 + OWN
    yield name_of(64, OUTER) + ", 4096 more own", 64, OUTER, 8192 + OWN


def rehearsal_cases(_):
    requests, groups = batch_of(3, 512)
    yield name_of(requests, groups), requests, groups, 512 + OWN


def kinds(_):
    return [Layer(HEADS, "causal", PAGE)]


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
    name, requests, groups, keys = case
    attention = bench.layers[kinds(case)[0]]
    table, total_pages = shared_table(requests, groups, keys)
    caches = bench.pool.caches(HEADS, PAGE, total_pages, most=LAUNCHES)
    query = bench.random(requests, HEADS.query, HEADS.dim)
    gigabytes = 1e-9 * requests * keys * HEADS.bytes_a_token

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
        kv_caches = [qkv.KvCache(*views_of(cache, HEADS)) for cache in caches]
        calls = [lambda kv_cache=kv_cache: attention.forward(query, kv_cache, plan, out) for kv_cache in kv_caches]
        return bench.timer.graph(calls, LAUNCHES).seconds, out

    results = {sharing: seconds_of(sharing) for sharing in SHARINGS}
    for sharing in SHARINGS[1:]:
        if not torch.equal(results[sharing][1], results["off"][1]):
            raise AssertionError(f"prefix_sharing {sharing} has other bits than off")
    micros = {sharing: 1e6 * seconds for sharing, (seconds, _) in results.items()}
    best = min(micros["off"], micros["always"])
    bench.report.add(
        f"prefixes {name}",
        "GB/s",
        1e6 * gigabytes / micros["automatic"],
        {sharing: 1e6 * gigabytes / micros[sharing] for sharing in ("off", "always")},
        note=", ".join(f"{sharing} {time:.1f} us" for sharing, time in micros.items())
        + f"; automatic {100 * (micros['automatic'] / best - 1):+.1f} % over the better",
        microseconds=micros,
    )
