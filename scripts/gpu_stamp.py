"""What the GPU tests last ran on.  gpu_stamp.py check | hash | write --device D --driver V --passed N --failed N

tests/gpu/verified.json holds the hash of every source that reaches a GPU kernel and the result of the last run. CI has
no GPU: it checks that the hash is that of the sources, or that the file says `unverified` and why. Lines that are
comments alone do not count, nor does white space: a formatter changes no kernel."""

import argparse
import datetime
import hashlib
import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAMP = ROOT / "tests" / "gpu" / "verified.json"
SOURCES = ("src/cuda/**/*", "src/jit/*", "src/core/index/*", "src/mask/emit.*", "src/mask/compile.cpp", "src/plan/*")


def code_of(path):
    """A source without white space and lines that are comments alone."""
    lines = [line for line in path.read_bytes().split(b"\n") if not line.lstrip().startswith(b"//")]
    return b"".join(b"".join(lines).split())


def sources_hash():
    digest = hashlib.sha256()
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern) if path.is_file()):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + code_of(path) + b"\0")
    return digest.hexdigest()


def check():
    stamp = json.loads(STAMP.read_text())
    if stamp["status"] == "unverified":
        print(f"unverified: {stamp['why']}")
        return 0
    if stamp["sources"] != sources_hash():
        print(
            "The GPU sources have changed since they were tested: run `make test-gpu` on a machine with a GPU, or set"
        )
        print(f"the status in {STAMP.relative_to(ROOT)} to unverified and say why.")
        return 1
    if stamp["status"] != "verified":
        counts = f"{stamp['passed']} passed, {stamp['failed']} of the processes failed"
        print(f"{stamp['status']}: {counts} on {stamp['device']}, {stamp['date']}")
        return 1
    print(f"verified: {stamp['passed']} passed on {stamp['device']}, driver {stamp['driver']}, {stamp['date']}")
    return 0


def write(arguments):
    status = "verified" if arguments.failed == 0 and arguments.passed > 0 else "failed"
    stamp = {
        "status": status,
        "sources": sources_hash(),
        "device": arguments.device,
        "driver": arguments.driver,
        "date": datetime.date.today().isoformat(),
        "passed": arguments.passed,
        "failed": arguments.failed,
    }
    STAMP.write_text(json.dumps(stamp, indent=2) + "\n")
    print(f"written: {STAMP.relative_to(ROOT)}: {status}")
    return 0 if status == "verified" else 1


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check")
    commands.add_parser("hash")
    writer = commands.add_parser("write")
    writer.add_argument("--device", required=True)
    writer.add_argument("--driver", required=True)
    writer.add_argument("--passed", type=int, required=True)
    writer.add_argument("--failed", type=int, required=True)
    arguments = parser.parse_args()
    if arguments.command == "hash":
        print(sources_hash())
        return 0
    return check() if arguments.command == "check" else write(arguments)


if __name__ == "__main__":
    sys.exit(main())
