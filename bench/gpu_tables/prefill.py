"""Prefill: 16k new tokens in all, hidden size 2048, full and causal, keys dense and in pages of 16.

TFLOP/s count 4 * s^2 * heads * dim * requests, half of it where causal. The number of a row is the steady one.
FlashInfer reads the pages, and stands beside them; the other peers read dense keys, and stand beside both."""

import numpy as np
import qkv
import torch

from gpu_tables.layers import Heads, Layer, in_pages, make_plan, num_pages

HEADS = {
    "64": Heads(32, 32, 64),
    "128": Heads(16, 16, 128),
    "192/128": Heads(16, 16, 192, 128),
    "256": Heads(8, 8, 256),
}
GROUPED = [Heads(16, 4, 128), Heads(16, 2, 128), Heads(32, 4, 64)]
LENGTHS = [512, 1024, 2048, 4096, 16384]
TOTAL, PAGE, PRODUCT = 16384, 16, 8192
MATRIX_FLOPS_A_CYCLE_AND_SM = {(9, 0): 4096}  # dense bf16


def cases(options):
    heads = [HEADS[name] for name in options.head_dims or HEADS]
    for one in heads:
        for length in options.lengths or LENGTHS:
            for mask in ("true", "causal"):
                yield one, length, mask
    if not options.head_dims:
        for one in GROUPED:
            yield from ((one, length, "causal") for length in (4096, 16384) if length in (options.lengths or LENGTHS))


def rehearsal_cases(_):
    yield Heads(4, 4, 64), 64, "causal"
    yield Heads(4, 2, 32), 32, "true"


def kinds(case):
    heads, _, mask = case
    return [Layer(heads, mask, page) for page in (0, PAGE)]


def prepare(bench):
    total, size = (TOTAL, PRODUCT) if bench.on_gpu else (128, 256)
    bench.total_tokens = total
    bench.product_flops, bench.product = bench.matrix_product(size)
    bench.product_rate = product_rate(bench)
    bench.say(f"matrix product {size}^3 bf16, steady: {bench.product_rate:.0f} TFLOP/s")


def finish(bench):
    bench.say(f"matrix product again: {product_rate(bench):.0f} TFLOP/s")


def product_rate(bench):
    return rate(bench.product_flops, bench.timer.steady({"product": bench.product})["product"])


def rate(flops, time):
    return flops / time.seconds * 1e-12


def run(bench, case):
    heads, length, mask = case
    causal = mask == "causal"
    requests = bench.total_tokens // length
    shape = (requests, length)
    query = bench.random(*shape, heads.query, heads.dim)
    key = bench.random(*shape, heads.kv, heads.dim)
    value = bench.random(*shape, heads.kv, heads.value_dim)
    flops = 2.0 * length * length * heads.query * (heads.dim + heads.value_dim) * requests * (0.5 if causal else 1)

    pages = pages_of(query, key, value)
    calls = {"dense": dense_call(bench, case, query, key, value), "page 16": paged_call(bench, case, query, *pages)}
    want = calls["dense"]()
    bench.expect_close("qkv page 16", calls["page 16"](), want)
    makers = {name: lambda make=make: make(query, key, value, causal) for name, make in bench.peers.items()}
    if bench.flash_infer is not None:
        makers["FlashInfer"] = lambda: flash_infer_call(bench, case, query, *pages)
    for name, make in makers.items():
        try:
            call = make()
            bench.expect_close(name, call().reshape(want.shape), want)
            calls[name] = call
        except Exception as error:  # of many kinds: what the peer does not do
            bench.report.leave_out(f"{name} at d{heads.dim}/{heads.value_dim}", error)

    steady = bench.timer.steady(calls)
    one_by_one = {name: bench.timer.bench(call) for name, call in calls.items()}
    dense_peers = [name for name in calls if name in bench.peers]
    for layout, names in (("dense", dense_peers), ("page 16", [name for name in calls if name in makers])):
        peers = {name: rate(flops, steady[name]) for name in names}
        used = utilisation(flops, steady[layout], bench)
        bench.report.add(
            f"prefill {heads} s{length} {'causal' if causal else 'full'} {layout}",
            "TFLOP/s",
            rate(flops, steady[layout]),
            peers,
            limit=bench.product_rate,
            note=f"bench {rate(flops, one_by_one[layout]):.0f}"
            + (f", {steady[layout].clock_mhz:.0f} MHz, matrix units {100 * used:.0f} %" if used else ""),
            matrix_unit_utilisation=used,
            clock_mhz={"qkv": steady[layout].clock_mhz} | {name: steady[name].clock_mhz for name in peers},
            bench={"qkv": rate(flops, one_by_one[layout])} | {name: rate(flops, one_by_one[name]) for name in peers},
        )


def dense_call(bench, case, query, key, value):
    attention = bench.layers[kinds(case)[0]]
    requests, length = query.shape[:2]
    plan = make_plan(attention, [(length, length)] * requests)
    query, key, value = (tensor.flatten(0, 1) for tensor in (query, key, value))
    out = torch.empty(*query.shape[:2], value.shape[2], dtype=query.dtype, device=query.device)
    return lambda: attention.forward(query, key, value, plan, out)


def pages_of(query, key, value):
    """(lengths, page numbers in random order, keys in pages, values in pages)"""
    requests, length = query.shape[:2]
    lengths = [(length, length)] * requests
    order = np.random.default_rng(1).permutation(num_pages(lengths, PAGE)).astype(np.int32)
    return lengths, order, in_pages(key, order, PAGE), in_pages(value, order, PAGE)


def paged_call(bench, case, query, lengths, order, key, value):
    attention = bench.layers[kinds(case)[1]]
    plan = make_plan(attention, lengths, pages=order)
    kv_cache = qkv.KvCache(key, value)
    query = query.flatten(0, 1)
    out = torch.empty(*query.shape[:2], value.shape[3], dtype=query.dtype, device=query.device)
    return lambda: attention.forward(query, kv_cache, plan, out)


def flash_infer_call(bench, case, query, lengths, order, key, value):
    heads, _, mask = case
    wrapper = bench.flash_infer.prefill(heads, PAGE, lengths, order, causal=mask == "causal")
    query = query.flatten(0, 1)
    out = torch.empty(*query.shape[:2], value.shape[3], dtype=query.dtype, device=query.device)
    return lambda: wrapper.run(query, (key, value), out=out)


def utilisation(flops, time, bench):
    """Of the matrix units: useful operations over what they could do at the clock that was measured."""
    a_cycle = MATRIX_FLOPS_A_CYCLE_AND_SM.get(bench.capability)
    if a_cycle is None or time.clock_mhz is None:
        return None
    return flops / time.seconds / (a_cycle * bench.num_sms * time.clock_mhz * 1e6)
