"""What compiling the tables' kernels took, from the lines that QKV_LOG=compile writes while the layers are made."""

import os
import re
import sys
import tempfile
from contextlib import contextmanager

LINE = re.compile(
    r"qkv compile: (?P<name>.*) \((?P<arch>sm_\w+)\): (?P<seconds>[\d.]+) s, (?P<registers>\d+) registers, "
    r"spills (?P<stored>\d+) \+ (?P<loaded>\d+) bytes"
)


@contextmanager
def recorded(lines):
    """Appends to `lines` what the library writes to stderr meanwhile."""
    os.environ["QKV_LOG"] = "compile"
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile("w+") as log:
        os.dup2(log.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            del os.environ["QKV_LOG"]
            log.seek(0)
            lines.extend(log.read().splitlines())


def add_rows(report, lines):
    """A row a kernel in the file; on the terminal a line for each kind."""
    rows = {}
    for line in sorted(set(lines)):
        match = LINE.search(line)
        if match is None:
            report.progress.print(line)  # something else that was said, not to be lost
            continue
        spills = int(match["stored"]) + int(match["loaded"])
        report.add(
            match["name"],
            "s",
            float(match["seconds"]),
            higher_is_better=False,
            quiet=True,
            registers=int(match["registers"]),
            spilled_bytes=spills,
            arch=match["arch"],
        )
        rows.setdefault(match["name"].split()[0], []).append(report.rows[-1])
    for kind, made in rows.items():
        seconds, registers = [row["qkv"] for row in made], [row["registers"] for row in made]
        report.progress.print(
            f"{kind:<26} {len(made):4} kernels, {min(seconds):.2f} to {max(seconds):.2f} s each, at most "
            f"{max(registers)} registers, {sum(row['spilled_bytes'] > 0 for row in made)} that spill"
        )
