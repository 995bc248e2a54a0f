"""bench/gpu.py and bench/replay_peer.py rehearsed on the CPU: every table runs on tiny shapes, compares its peers, and
writes its rows. Where FlashInfer takes part, stand_ins/flashinfer.py stands for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench"
STAND_INS = Path(__file__).parent / "stand_ins"
pytest.importorskip("torch")


def run(*arguments, script="gpu.py", stand_ins=False):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "QKV_THREADS": "1"}  # two pools would spin against each other
    if stand_ins:
        environment["PYTHONPATH"] = f"{STAND_INS}:{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, BENCH / script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment)


def rehearse(tables, folder, **options):
    result = run(*tables, "--device", "cpu", "--seconds", "0.001", "--no-pictures", "--out", folder, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout, {path.stem: json.loads(path.read_text()) for path in (folder / "cpu").glob("*.json")}


def test_every_table_writes_rows_with_peers_and_limits(tmp_path):
    _, rows = rehearse([], tmp_path)
    names = ("prefill", "decode", "fp8", "mixed", "masks", "prefixes", "planner", "ops")
    assert set(rows) == {f"gpu_{name}" for name in names}
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
    nothing = run("ops", "--device", "cpu", "--filter", "nothing", "--out", tmp_path)
    assert nothing.returncode != 0 and "'nothing' matches no case; one is: cache write 64 float32" in nothing.stderr


def test_flash_infer_reads_the_same_pages_and_stands_beside_them(tmp_path):
    said, rows = rehearse(["prefill", "decode", "mixed"], tmp_path, stand_ins=True)
    assert "without FlashInfer" not in said  # it was compared with qkv, and did not differ
    assert all({"FlashInfer"} <= row["peers"].keys() for name in ("gpu_decode", "gpu_mixed") for row in rows[name])
    assert {"FlashInfer, tensor cores", "FlashInfer, CUDA cores"} <= rows["gpu_decode"][1]["microseconds"].keys()
    assert {"FlashInfer, one call", "FlashInfer, two calls"} <= rows["gpu_mixed"][0]["microseconds"].keys()
    beside = {"dense": {"torch"}, "page 16": {"torch", "FlashInfer"}}
    assert all(row["peers"].keys() == beside[row["case"].split(maxsplit=5)[-1]] for row in rows["gpu_prefill"])


def test_a_peer_that_fails_is_left_out_in_one_line(tmp_path):
    (tmp_path / "flashinfer.py").write_text("raise RuntimeError('needs\\nanother machine')")
    environment = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", environment)
        said, rows = rehearse(["mixed"], tmp_path)
    assert said.count("without FlashInfer: RuntimeError: needs\n") == 1
    assert rows["gpu_mixed"][0]["peers"] == {}


@pytest.fixture
def steps(tmp_path):
    kind = {"layers": 3, "caches": 2, "heads": 4, "kv_heads": 2, "head_dim": 16, "head_dim_v": 16, "dtype": "bf16"}
    setting = {"model": "small", "page_size": 8, "pages": 40, "max_step_tokens": 32}
    setting["kinds"] = [kind | {"window": 0}, kind | {"window": 9}]
    batches = [{"new": [30], "keys": [30]}, {"new": [1, 20], "keys": [31, 20]}, {"new": [1, 1], "keys": [32, 21]}]
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [setting, *batches]))
    return path


def test_replay_peer_runs_every_step_and_prints_both_rows(steps, tmp_path):
    qkv = {
        "setting": {"version": "0.1.0"},
        "steps": 3,
        "step_ms": dict.fromkeys(("median", "p95", "p99", "worst"), 2.0),
    }
    qkv |= {"planning_ms": qkv["step_ms"], "share": {"planning": 0.2}, "rate": {"tokens_a_second": 800.0}}
    (tmp_path / "qkv.json").write_text(json.dumps(qkv))
    arguments = [steps, "--device", "cpu", "--beside", tmp_path / "qkv.json", "--json", tmp_path / "peer.json"]
    result = run(*arguments, script="replay_peer.py", stand_ins=True)
    assert result.returncode == 0, result.stderr
    _, ours, theirs = result.stdout.splitlines()
    assert ours.split()[-1] == "1000"  # 800 tokens a second, of whose time a fifth is planning
    assert theirs.startswith("FlashInfer stand-in")
    report = json.loads((tmp_path / "peer.json").read_text())
    assert report["steps"] == 3 and 0 < report["share"]["planning"] < 1
    assert report["step_ms"]["median"] <= report["step_ms"]["p99"] <= report["step_ms"]["worst"]


def test_replay_peer_says_what_it_cannot_run(steps):
    steps.write_text(steps.read_text().replace('"head_dim_v": 16', '"head_dim_v": 8'))
    result = run(steps, "--device", "cpu", script="replay_peer.py", stand_ins=True)
    assert result.returncode == 1 and "allowed: values as long as keys" in result.stderr
