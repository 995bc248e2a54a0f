"""bench/gpu.py rehearsed on the CPU: every table runs on tiny shapes, compares its peers, and writes its rows."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu.py"
pytest.importorskip("torch")


def run(*arguments):
    quiet = os.environ | {"OMP_NUM_THREADS": "1", "QKV_THREADS": "1"}  # two pools would spin against each other
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=600, env=quiet)


def test_every_table_writes_rows_with_peers_and_limits(tmp_path):
    result = run("--device", "cpu", "--seconds", "0.001", "--no-pictures", "--out", tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    rows = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "cpu").glob("*.json")}
    assert set(rows) == {"gpu_prefill", "gpu_decode", "gpu_mixed", "gpu_masks", "gpu_ops"}
    for row in [row for table in rows.values() for row in table]:
        assert row["qkv"] > 0 and all(rate > 0 for rate in row["peers"].values())
    assert all(row["peers"].keys() == {"torch"} and row["limit"] > 0 for row in rows["gpu_prefill"])
    assert [row["peers"].keys() for row in rows["gpu_decode"]] == [{"torch"}, set()]  # one length, two lengths


def test_filter_and_tables_choose(tmp_path):
    result = run("ops", "--device", "cpu", "--filter", "merge", "--no-pictures", "--out", tmp_path)
    assert result.returncode == 0, result.stderr
    assert [path.name for path in (tmp_path / "cpu").iterdir()] == ["gpu_ops.json"]
    assert [row["case"] for row in json.loads((tmp_path / "cpu/gpu_ops.json").read_text())] == [
        "merge 2 32 tokens h32 d128 bfloat16"
    ]
    assert "allowed: compiled, prefill" in run("speed").stderr
