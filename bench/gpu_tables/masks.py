"""What masks cost: time a visible tile of 128 x 128 pairs, against the causal mask's of the same length. Tiles are
counted by the library's own proof (classify_tile); one that is partly visible counts whole."""

import numpy as np
import qkv
import torch

from gpu_tables.layers import Heads, Layer, make_plan

HEADS, TILE = Heads(16, 16, 128), 128
MASKS = ["causal", "causal & window(1023, 0)", "prefix_lm", "rswa(1024)"]
LENGTHS = [4096, 16384]


def cases(_):
    return [(length, mask) for length in LENGTHS for mask in MASKS]


def rehearsal_cases(_):
    return [(256, mask.replace("1023", "63").replace("1024", "64")) for mask in MASKS]


def kinds(case):
    return [Layer(HEADS, case[1])]


def operands_of(length):
    """A span of an eighth of the tokens that sees itself whole, in the middle; a prefix of an eighth."""
    span = np.full(length, -1, np.int32)
    first, last = length // 2, length // 2 + length // 8 - 1
    starts, ends = span.copy(), span.copy()
    starts[first : last + 1], ends[first : last + 1] = first, last
    return {"span_start": starts, "span_end": ends, "prefix_len": np.array([length // 8], np.int32)}


def visible_tiles(mask, length):
    scene = qkv.MaskScene(q_len=length, kv_len=length, operands=operands_of(length))
    mask = qkv.parse_mask(mask)
    steps = range(0, length, TILE)
    classes = (qkv.classify_tile(mask, scene, q, q + TILE, k, k + TILE) for q in steps for k in steps)
    return sum(tile != "empty" for tile in classes)


def run(bench, case):
    length, mask = case
    attention = bench.layers[kinds(case)[0]]
    plan = make_plan(attention, [(length, length)], operands=operands_of(length))
    query, key, value = (bench.random(length, HEADS.kv, HEADS.dim) for _ in range(3))
    out = torch.empty_like(query)
    time = bench.timer.steady({"qkv": lambda: attention.forward(query, key, value, plan, out)})["qkv"]
    tiles = visible_tiles(mask, length)
    nanos = time.seconds * 1e9 / (tiles * HEADS.query)
    if mask == "causal":
        bench.nanos_of_causal = nanos
    bench.report.add(
        f"mask {mask} s{length} {HEADS}",
        "ns/tile",
        nanos,
        {"causal": bench.nanos_of_causal},
        note=f"{time.seconds * 1e6:.0f} us, {tiles} tiles a head",
        higher_is_better=False,
        microseconds={"qkv": time.seconds * 1e6},
        visible_tiles=tiles,
    )
