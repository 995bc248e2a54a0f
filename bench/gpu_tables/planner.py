"""Plans: what it costs to make one on the device, and what a step costs that was planned for any batch to come.

planner N: the kernels that plan a batch of N decode requests on the device, a launch of a graph. Linear in N.
step ...: forward with a plan made for the batch alone ("eager"), and with a planner's, whose limits are the batch
itself or 256 requests of 128k keys: what captured launches pay for serving every batch."""

import numpy as np
import qkv
import torch

from gpu_tables.decode import BATCHES
from gpu_tables.layers import Heads, Layer, num_pages, views_of

HEADS, PAGE = Heads(32, 8, 128), 16
PLANNED = [1, 16, 256, 1024, 4096]
KEYS = 2048  # of a request that is planned only: its pages are named, never read
LAUNCHES = 20


def cases(_):
    yield from (("planner", requests) for requests in PLANNED)
    yield from (("step", name) for name in BATCHES)


def rehearsal_cases(_):
    yield "step", "1x1k"


def kinds(_):
    return [Layer(HEADS, "causal", PAGE)]


def run(bench, case):
    what, which = case
    attention = bench.layers[kinds(case)[0]]
    if what == "planner":
        time_planner(bench, attention, which)
    else:
        time_step(bench, attention, which)


def arrays_of(lengths, table):
    starts = np.arange(len(lengths) + 1, dtype=np.int32)
    return {"query_start_loc": starts, "seq_lens": np.array(lengths, np.int32), "block_table": table}


def limits_of(requests, longest, pages, keys=0):
    return {
        "max_requests": requests,
        "max_tokens": requests,
        "max_query_len": 1,
        "max_seq_len": longest,
        "max_keys": keys,
        "num_pages": pages,
    }


def time_planner(bench, attention, requests):
    table = np.zeros((requests, KEYS // PAGE), np.int32)
    on_device = {
        name: torch.from_numpy(array).to(bench.device) for name, array in arrays_of([KEYS] * requests, table).items()
    }
    slots = torch.full((requests,), -1, dtype=torch.int64, device=bench.device)
    planner = attention.planner(**limits_of(requests, KEYS, 1), plans_on_device=True)
    batch = qkv.Batch(**on_device, slot_mapping=slots)
    seconds = bench.timer.graph([lambda: planner.plan(batch)], LAUNCHES).seconds
    bench.report.add(f"planner {requests} requests", "us", 1e6 * seconds, higher_is_better=False)


def time_step(bench, attention, name):
    lengths = BATCHES[name]
    counts = [num_pages([(1, length)], PAGE) for length in lengths]
    table = np.zeros((len(lengths), max(counts)), np.int32)
    order = np.random.default_rng(5).permutation(sum(counts)).astype(np.int32)
    table[np.arange(max(counts)) < np.array(counts)[:, None]] = order
    batch = qkv.Batch(**arrays_of(lengths, table), prefix_sharing="off")
    caches = [qkv.KvCache(*views_of(cache, HEADS)) for cache in bench.pool.caches(HEADS, PAGE, sum(counts), LAUNCHES)]
    most = max(256, len(lengths))
    query = bench.random(most, HEADS.query, HEADS.dim)
    out = torch.empty_like(query)

    def micros_of(plan):
        calls = [lambda cache=cache: attention.forward(query, cache, plan, out) for cache in caches]
        return 1e6 * bench.timer.graph(calls, LAUNCHES).seconds

    micros = {"eager": micros_of(attention.plan(batch))}
    for which, limits in {
        "its own limits": limits_of(len(lengths), max(lengths), sum(counts)),
        "256 requests of 128k": limits_of(most, 131072, sum(counts), keys=1 << 20),
    }.items():
        planner = attention.planner(**limits)
        micros[which] = micros_of(planner.plan(batch))
    bench.report.add(
        f"step {name} {HEADS} page{PAGE}",
        "us",
        micros["its own limits"],
        {"eager": micros["eager"]},
        note=f"256 requests of 128k {micros['256 requests of 128k']:.2f} us",
        higher_is_better=False,
        microseconds=micros,
    )
