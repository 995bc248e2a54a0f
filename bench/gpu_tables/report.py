"""What the tables have in common on the way out: rows, the terminal, files, pictures."""

import datetime
import json
import sys


class Progress:
    """One line on a terminal that says what is under way; nothing where the output goes to a file."""

    WIDTH = 30

    def __init__(self, total):
        self.total, self.done, self.label = total, 0, ""
        self.visible = sys.stderr.isatty()

    def __call__(self, label):
        self.done += 1
        self.show(label)

    def show(self, label):
        self.label = label
        if self.visible:
            filled = self.WIDTH * self.done // max(self.total, 1)
            bar = "#" * filled + "." * (self.WIDTH - filled)
            print(f"\r\033[K[{bar}] {self.done}/{self.total} {label[:60]}", end="", file=sys.stderr, flush=True)

    def clear(self):
        if self.visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def print(self, line):
        """A line above the bar."""
        self.clear()
        print(line, flush=True)
        if self.visible:
            self.show(self.label)


class Report:
    """Rows in the form of the CPU suites: case, unit, higher_is_better, qkv, peers, limit, commit, date. A table adds
    what else it knows (clocks, microseconds, other ways of timing) under names of its own."""

    def __init__(self, folder, commit, machine, progress):
        self.folder, self.progress = folder, progress
        self.common = {"commit": commit, "date": datetime.date.today().isoformat(), "machine": machine}
        self.rows = []
        self.left_out = {}

    def add(self, case, unit, qkv, peers=None, limit=None, note="", higher_is_better=True, quiet=False, **more):
        peers = peers or {}
        row = {"case": case, "unit": unit, "higher_is_better": higher_is_better}
        row |= {"qkv": qkv, "peers": peers, "limit": limit, **more, **self.common}
        self.rows.append(row)
        if quiet:
            return
        text = f"{case:<46} {qkv:8.1f} {unit:<8}"
        if limit:
            text += f" {100 * qkv / limit:4.0f} %"
        for name, rate in peers.items():
            text += f" | {qkv / rate if higher_is_better else rate / qkv:5.2f} x {name} ({rate:.1f})"
        self.progress.print(text + (f" | {note}" if note else ""))

    def leave_out(self, what, error):
        """Says once why a peer or a limit is missing."""
        reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
        if what not in self.left_out:
            self.progress.print(f"  without {what}: {reason}")
        self.left_out.setdefault(what, reason)

    def write(self, table, draw):
        """RESULTS/gpu_<table>.json, and a picture beside it."""
        if not self.rows:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"gpu_{table}.json"
        path.write_text(json.dumps(self.rows, indent=1) + "\n")
        self.progress.print(f"written: {path}")
        if draw:
            draw(path)
        self.rows = []
