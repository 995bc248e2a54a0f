#!/usr/bin/env python3
"""Runs the steps of a qkv replay through FlashInfer, on the GPU:

    qkv replay trace.csv --device cuda --write-steps steps.jsonl --json qkv.json
    python bench/replay_peer.py steps.jsonl --beside qkv.json

The same batches, layers, heads and caches: a step is planned once for each kind of layer, then every layer appends its
new keys and values to its pages and attends. As engines do that use FlashInfer, requests with one new token go through
its decode wrapper, all others through its prefill wrapper. A step ends when the device is done. Queries, keys and
values are random, and so are the numbers of the pages. docs/replay.md says what is compared."""

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

try:
    import torch
except ImportError:
    sys.exit("bench/replay_peer.py needs torch with CUDA in this environment: pip install torch")
from gpu_tables.flash_infer import FlashInfer, int32, page_table, plan_decode, plan_prefill, query_starts
from gpu_tables.report import Progress

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


@dataclass(frozen=True)
class Heads:
    query: int
    kv: int
    dim: int
    value_dim: int


class Layers:
    """Layers of one kind: their caches, their activations at the largest step, the wrappers that they share."""

    def __init__(self, peer, setting, kind):
        self.heads = Heads(kind["heads"], kind["kv_heads"], kind["head_dim"], kind["head_dim_v"])
        if self.heads.dim != self.heads.value_dim or kind["dtype"] not in DTYPES:
            sys.exit(f"{setting['model']}: allowed: values as long as keys, {' or '.join(DTYPES)}")
        self.peer, self.page = peer, setting["page_size"]
        self.options = {"dtype": DTYPES[kind["dtype"]], "window": kind["window"]}
        heads, tokens = self.heads, setting["max_step_tokens"]

        def random(*shape):
            return torch.randn(*shape, dtype=self.options["dtype"], device=peer.device)

        shape = (setting["pages"], 2, self.page, heads.kv, heads.dim)
        caches = [random(*shape) for _ in range(kind["caches"])]
        self.cache_of_layer = [caches[layer % len(caches)] for layer in range(kind["layers"])]
        self.query, self.out = random(tokens, heads.query, heads.dim), random(tokens, heads.query, heads.dim)
        self.key, self.value = random(tokens, heads.kv, heads.dim), random(tokens, heads.kv, heads.dim)
        self.decode, self.prefill = peer.new_decode(tensor_cores=True), peer.new_prefill()

    def plan(self, step):
        if step.num_decodes:
            plan_decode(self.decode, self.heads, self.page, step.decode_table, **self.options)
        if step.prefill_table:
            plan_prefill(self.prefill, self.heads, self.page, step.prefill_starts, step.prefill_table, **self.options)

    def run(self, step, appended):
        request, position, offsets, pages, last = appended
        decodes, tokens = slice(0, step.num_decodes), slice(0, step.num_tokens)
        chunks = slice(step.num_decodes, step.num_tokens)
        for cache in self.cache_of_layer:
            self.peer.library.append_paged_kv_cache(
                self.key[tokens], self.value[tokens], request, position, cache, pages, offsets, last, "NHD"
            )
            if step.num_decodes:
                self.decode.run(self.query[decodes], cache, out=self.out[decodes])
            if step.prefill_table:
                self.prefill.run(self.query[chunks], cache, out=self.out[chunks])


class Step:
    """A step's index arrays on the host, decodes first. Made before the clock starts, as a scheduler makes them."""

    def __init__(self, new, keys, page, pages):
        lengths = sorted(zip(new, keys, strict=True), key=lambda pair: pair[0] > 1)
        self.num_decodes, self.num_tokens = sum(one == 1 for one in new), sum(new)
        self.table = page_table(lengths, page, pages[: sum(-(-length // page) for length in keys)])
        offsets, numbers, _ = self.table
        split = offsets[self.num_decodes]
        self.decode_table = page_table(lengths[: self.num_decodes], page, numbers[:split])
        chunks = lengths[self.num_decodes :]
        self.prefill_table = page_table(chunks, page, numbers[split:]) if chunks else None
        self.prefill_starts = query_starts(chunks)
        self.request = int32(np.repeat(np.arange(len(lengths)), [one for one, _ in lengths]))
        self.position = int32(np.concatenate([np.arange(length - one, length) for one, length in lengths]))

    def appended(self, device):
        """The request and the position of each new token, and the page table, on the device."""
        return [array.to(device, non_blocking=True) for array in (self.request, self.position, *self.table)]


def run_step(step, kinds, device):
    """(seconds of planning, seconds in all), on the host's clock."""
    begin = time.perf_counter()
    appended = step.appended(device)
    for kind in kinds:
        kind.plan(step)
    planned = time.perf_counter()
    for kind in kinds:
        kind.run(step, appended)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return planned - begin, time.perf_counter() - begin


def warm_up(setting, kinds, device):
    """Loads, or compiles, what the steps will run: decodes, long chunks, short ones."""
    most = setting["max_step_tokens"]
    for new, keys in (([1], [1]), ([1, max(1, min(most - 1, 512))], [300, 600]), ([min(most, 20)], [64])):
        pages = np.zeros(sum(-(-length // setting["page_size"]) for length in keys), np.int32)
        run_step(Step(new, keys, setting["page_size"], pages), kinds, device)


def replay(lines, setting, kinds, device, progress):
    """Rows of (planning, seconds, tokens), one a step."""
    pages = np.random.default_rng(6).permutation(setting["pages"]).astype(np.int32)
    rows = []
    for number, line in enumerate(lines, 1):
        batch = json.loads(line)
        step = Step(batch["new"], batch["keys"], setting["page_size"], pages)
        rows.append((*run_step(step, kinds, device), step.num_tokens))
        progress(f"step {number}, {1e3 * rows[-1][1]:.1f} ms")
    progress.clear()
    return np.array(rows)


def milliseconds(seconds):
    names = {"median": 50, "p95": 95, "p99": 99, "worst": 100}
    return {name: 1e3 * float(np.percentile(seconds, percent)) for name, percent in names.items()}


def report_of(rows, setting, peer):
    planning, seconds, tokens = rows.T
    return {
        "setting": {"engine": f"FlashInfer {peer.library.__version__}", "model": setting["model"]},
        "steps": len(rows),
        "step_ms": milliseconds(seconds),
        "planning_ms": milliseconds(planning),
        "share": {"planning": float(planning.sum() / seconds.sum())},
        "rate": {"tokens_a_second": float(tokens.sum() / seconds.sum())},
    }


def print_table(reports):
    print(f"{'':<18}{'step: median':>14}{'95 %':>9}{'99 %':>9}{'worst':>9}{'planning: median':>18}{'99 %':>9}"
          f"{'share':>9}{'tokens/s':>11}{'without planning':>18}")  # fmt: skip
    for name, report in reports.items():
        step, planning, share = report["step_ms"], report["planning_ms"], report["share"]["planning"]
        rate = report["rate"]["tokens_a_second"]
        print(f"{name:<18}{step['median']:>11.2f} ms{step['p95']:>9.2f}{step['p99']:>9.2f}{step['worst']:>9.2f}"
              f"{planning['median']:>15.3f} ms{planning['p99']:>9.3f}{100 * share:>7.1f} %{rate:>11.0f}"
              f"{rate / (1 - share):>18.0f}")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=Path, help="what qkv replay --write-steps wrote")
    parser.add_argument(
        "--beside", type=Path, metavar="REPORT", help="of qkv replay --json: its row beside FlashInfer's"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument("--stop-after", type=int, metavar="STEPS", help="run only so many steps")
    parser.add_argument("--device", default="cuda:0", help="default: %(default)s")
    options = parser.parse_args()
    first, *lines = options.steps.read_text().splitlines() or [""]
    if not lines or '"kinds"' not in first:
        sys.exit(f"{options.steps}: not a file of steps; allowed: what qkv replay --write-steps wrote")
    setting, lines = json.loads(first), lines[: options.stop_after]
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU")
    try:
        peer = FlashInfer(device)
    except ImportError as error:
        sys.exit(f"bench/replay_peer.py needs FlashInfer in this environment: {error}")
    kinds = [Layers(peer, setting, kind) for kind in setting["kinds"]]
    warm_up(setting, kinds, device)
    report = report_of(replay(lines, setting, kinds, device, Progress(len(lines))), setting, peer)
    reports = {report["setting"]["engine"]: report}
    if options.beside:
        qkv = json.loads(options.beside.read_text())
        if qkv["steps"] != report["steps"]:
            print(f"not the same steps: {qkv['steps']} of qkv, {report['steps']} of FlashInfer")
        reports = {f"qkv {qkv['setting']['version']}": qkv} | reports
    print_table(reports)
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
