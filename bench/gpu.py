#!/usr/bin/env python3
"""Measures qkv on a GPU beside its peers, in one process: make bench-gpu, or  python bench/gpu.py [TABLE ...].

Tables: compiled (seconds and registers of each kernel), prefill, decode, fp8, mixed, masks, prefixes, planner, ops.
Rows appear as they are measured; each table is written to bench/results/<device>/gpu_<table>.json with a picture beside
it. docs/benchmarks.md says what the numbers mean. Needs torch with CUDA; cupy for decode's limit and the clocks,
matplotlib for the pictures: what is missing is left out, and said."""

import argparse
import datetime
import os
import pathlib
import re
import subprocess
import sys

try:
    import torch
except ImportError:
    sys.exit("bench/gpu.py needs torch with CUDA in this environment: pip install torch")
import qkv
from gpu_tables import compiled, decode, fp8, masks, mixed, ops, planner, prefill, prefixes
from gpu_tables.clock import SmClock
from gpu_tables.flash_infer import FlashInfer
from gpu_tables.layers import Layers, Pool
from gpu_tables.loads import PageReader
from gpu_tables.peers import PEERS, matrix_product, peers_of
from gpu_tables.report import Progress, Report
from gpu_tables.timing import Timer

TABLES = {
    "prefill": prefill,
    "decode": decode,
    "fp8": fp8,
    "mixed": mixed,
    "masks": masks,
    "prefixes": prefixes,
    "planner": planner,
    "ops": ops,
}
POOL_BYTES = 5 << 30
TOLERANCE = 0.02  # relative, in the 2-norm: bf16 results of different kernels differ by some 1e-3


class Bench:
    """What the tables share: the device, layers, memory, peers, the report."""

    def __init__(self, options, report):
        self.device = torch.device(options.device)
        self.on_gpu = self.device.type == "cuda"
        self.report, self.say = report, report.progress.print
        self.timer = Timer(self.device, options.seconds, self.optional("SM clocks", SmClock) if self.on_gpu else None)
        self.layers = Layers(options.device)
        self.wanted_peers = options.peers
        self.peers = {name: make for name, make in peers_of(self.device).items() if self.wants_peer(name)}
        self.flash_infer = self.optional("FlashInfer", FlashInfer) if self.wants_peer("FlashInfer") else None
        self.pool = Pool(self.device, POOL_BYTES if self.on_gpu else 16 << 20)
        properties = torch.cuda.get_device_properties(self.device) if self.on_gpu else None
        self.capability = (properties.major, properties.minor) if properties else None
        self.num_sms = properties.multi_processor_count if properties else None
        self.page_reader = self.optional("decode's limit", PageReader)

    def wants_peer(self, name):
        return not self.wanted_peers or name in self.wanted_peers

    def optional(self, what, make):
        """None, and a line that says so, where a package is missing."""
        try:
            return make(self.device)
        except ImportError as error:
            return self.report.leave_out(what, error)

    def random(self, *shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device=self.device)

    def matrix_product(self, size):
        return matrix_product(self.device, size)

    def expect_close(self, name, got, want, tolerance=TOLERANCE):
        error = ((got.float() - want.float()).norm() / want.float().norm()).item()
        if not error <= tolerance:
            raise AssertionError(f"{name} differs from qkv by {error:.3g}")


def machine_of(options):
    if options.device == "cpu":
        return {"device": "cpu", "torch": torch.__version__}
    properties = torch.cuda.get_device_properties(torch.device(options.device))
    facts = {"device": properties.name, "torch": torch.__version__, "cuda": torch.version.cuda}
    facts["cudnn"] = str(torch.backends.cudnn.version())
    driver = re.search(r"CUDA ([\d.]+) at", qkv.info())
    return facts | ({"driver": f"CUDA {driver[1]}"} if driver else {})


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["compiled", *TABLES]
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"of {', '.join(names)} (default: all)")
    parser.add_argument("--device", default="cuda:0", help="cuda:N; cpu rehearses the script with tiny shapes")
    parser.add_argument("--filter", default="", help="only cases whose description matches this expression")
    parser.add_argument("--head-dims", nargs="*", choices=list(prefill.HEADS), help="prefill: only these head sizes")
    parser.add_argument("--lengths", nargs="*", type=int, choices=prefill.LENGTHS, help="prefill: only these lengths")
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=[*PEERS, "FlashInfer", "none"],
        help="only these, or none (default: all that are there)",
    )
    parser.add_argument("--seconds", type=float, default=0.2, help="of a steady turn (default: %(default)s)")
    parser.add_argument("--out", default="bench/results", help="folder of the results (default: %(default)s)")
    parser.add_argument("--no-pictures", action="store_true", help="JSON only")
    options = parser.parse_args()
    if unknown := [name for name in options.tables if name not in names]:
        parser.error(f"unknown table {unknown[0]!r}; allowed: {', '.join(names)}")
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("torch finds no GPU; allowed without one: --device cpu, which rehearses the script")
    return options


def describe(case):
    return " ".join(map(str, case))


def all_cases_of(table, options):
    make = TABLES[table].rehearsal_cases if options.device == "cpu" else TABLES[table].cases
    return make(options)


def cases_of(table, options):
    return [case for case in all_cases_of(table, options) if re.search(options.filter, describe(case))]


def example_of(tables, options):
    return describe(next(case for name in tables for case in all_cases_of(name, options)))


def commit():
    command = ["git", "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return os.environ.get("QKV_COMMIT") or found or "unknown"


def picture_drawer(options):
    if options.no_pictures:
        return None
    try:
        from plot import draw
    except ImportError as error:
        print(f"without pictures: {error}")
        return None
    return draw


def main():
    options = parse_arguments()
    torch.manual_seed(0)
    tables = [name for name in TABLES if not options.tables or name in options.tables]
    cases = {name: cases_of(name, options) for name in tables or TABLES}  # "compiled" alone: all that there is
    if not any(cases.values()):
        raise SystemExit(f"gpu.py: --filter {options.filter!r} matches no case; one is: {example_of(cases, options)}")
    machine = machine_of(options)
    kinds = list(dict.fromkeys(kind for name in cases for case in cases[name] for kind in TABLES[name].kinds(case)))
    progress = Progress(len(kinds) + sum(len(cases[name]) for name in tables))
    folder = pathlib.Path(options.out) / re.sub(r"[^a-z0-9]+", "-", machine["device"].lower())
    report = Report(folder, commit(), machine, progress)
    draw = picture_drawer(options)
    print(f"qkv {qkv.__version__} on {machine}, {datetime.datetime.now():%Y-%m-%d %H:%M}")

    bench = Bench(options, report)
    lines = []
    with torch.no_grad():
        with compiled.recorded(lines):
            bench.layers.compile(kinds, os.cpu_count(), progress)
        compiled.add_rows(report, lines)
        report.write("compiled", None)
        for name in tables:
            table = TABLES[name]
            if cases[name] and hasattr(table, "prepare"):
                table.prepare(bench)
            for case in cases[name]:
                progress(f"{name} {describe(case)}")
                table.run(bench, case)
            if cases[name] and hasattr(table, "finish"):
                table.finish(bench)
            report.write(name, draw)


if __name__ == "__main__":
    main()
