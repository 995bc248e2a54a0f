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
    for line in sorted(set(lines)):
        match = LINE.search(line)
        if match is None:
            report.progress.print(line)  # something else that was said, not to be lost
            continue
        registers, spills = int(match["registers"]), int(match["stored"]) + int(match["loaded"])
        report.add(
            f"{match['name']}",
            "s",
            float(match["seconds"]),
            note=f"{registers} registers" + (f", {spills} bytes spilled" if spills else ""),
            higher_is_better=False,
            registers=registers,
            spilled_bytes=spills,
            arch=match["arch"],
        )
