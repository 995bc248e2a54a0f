"""A step of a serving engine: 4 requests compute 2048 tokens on 6144 cached ones, 124 decode one token on 4095. Pages
of 16. TFLOP/s count 4 * heads * dim a visible (query, key) pair. FlashInfer: the better of one prefill call over the
whole step, and a prefill and a decode call one after the other."""

import numpy as np
import qkv
import torch

from gpu_tables.flash_infer import own_layout
from gpu_tables.layers import Heads, Layer, make_plan, num_pages, views_of, visible_pairs

HEADS, PAGE = Heads(32, 8, 128), 16
BATCHES = {"4x(2048 on 6144) + 124x(1 on 4095)": [(2048, 8192)] * 4 + [(1, 4096)] * 124}


def cases(_):
    return list(BATCHES.items())


def rehearsal_cases(_):
    return [("2x(16 on 16) + 3x(1 on 20)", [(16, 32)] * 2 + [(1, 21)] * 3)]


def kinds(_):
    return [Layer(HEADS, "causal", PAGE)]


def run(bench, case):
    name, lengths = case
    attention = bench.layers[kinds(case)[0]]
    total_pages = num_pages(lengths, PAGE)
    order = np.random.default_rng(3).permutation(total_pages).astype(np.int32)
    cache = bench.pool.caches(HEADS, PAGE, total_pages, most=1)[0]
    kv_cache = qkv.KvCache(*views_of(cache, HEADS))

    def seconds_of(part, pages):
        plan = make_plan(attention, part, pages=pages)
        query = bench.random(sum(new for new, _ in part), HEADS.query, HEADS.dim)
        out = torch.empty_like(query)
        return bench.timer.graph([lambda: attention.forward(query, kv_cache, plan, out)], launches=4).seconds

    whole = seconds_of(lengths, order)
    prefills = [pair for pair in lengths if pair[0] > 1]
    split = num_pages(prefills, PAGE)
    parts = [seconds_of(prefills, order[:split]), seconds_of(lengths[len(prefills) :], order[split:])]

    def check(name, query, got):
        same = qkv.KvCache(*own_layout(cache, HEADS).unbind(1))
        out = torch.empty_like(query)
        attention.forward(query, same, make_plan(attention, lengths, pages=order), out)
        bench.expect_close(name, got, out)

    peers = flash_infer_seconds(bench, lengths, order, cache, check)
    operations = 2 * sum(visible_pairs(new, keys, causal=True) for new, keys in lengths) * HEADS.query
    operations *= HEADS.dim + HEADS.value_dim
    bench.report.add(
        f"mixed {name} {HEADS} page{PAGE}",
        "TFLOP/s",
        1e-12 * operations / whole,
        {"FlashInfer": 1e-12 * operations / min(peers.values())} if peers else {},
        note=f"{whole * 1e6:.0f} us; its prefills alone {parts[0] * 1e6:.0f}, its decodes alone {parts[1] * 1e6:.0f}",
        microseconds={"qkv": whole * 1e6, "prefills alone": parts[0] * 1e6, "decodes alone": parts[1] * 1e6}
        | {name: seconds * 1e6 for name, seconds in peers.items()},
    )


def flash_infer_seconds(bench, lengths, order, cache, check):
    peer = bench.flash_infer
    if peer is None:
        return {}
    query = bench.random(sum(new for new, _ in lengths), HEADS.query, HEADS.dim)
    out = torch.empty_like(query)
    cache = own_layout(cache, HEADS)
    prefills = [pair for pair in lengths if pair[0] > 1]
    split, rows = num_pages(prefills, PAGE), sum(new for new, _ in prefills)

    def one_call():
        whole = peer.prefill(HEADS, PAGE, lengths, order)
        return lambda: whole.run(query, cache, out=out)

    def two_calls():
        first = peer.prefill(HEADS, PAGE, prefills, order[:split])
        second = peer.decode(HEADS, PAGE, lengths[len(prefills) :], order[split:], tensor_cores=True)

        def call():
            first.run(query[:rows], cache, out=out[:rows])
            second.run(query[rows:], cache, out=out[rows:])

        return call

    seconds = {}
    for name, make in (("FlashInfer, one call", one_call), ("FlashInfer, two calls", two_calls)):
        try:
            call = make()
            call()
            check(name, query, out)
            seconds[name] = bench.timer.graph([call], launches=4).seconds
        except Exception as error:  # of many kinds: what the peer does not do
            bench.report.leave_out(f"{name}, in a mixed batch", error)
    return seconds
