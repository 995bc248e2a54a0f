"""scripts/gpu_stamp.py: CI passes with tests that passed on these very sources, or a word on why they did not run."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stamp(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("gpu_stamp", ROOT / "scripts" / "gpu_stamp.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "STAMP", tmp_path / "verified.json")
    source = tmp_path / "src" / "cuda" / "device" / "kernel.cuh"
    source.parent.mkdir(parents=True)
    source.write_text("int x;\n")
    module.source = source
    return module


def write(stamp, monkeypatch, failed):
    arguments = ["--device", "G", "--driver", "1", "--passed", "5", "--failed", str(failed)]
    monkeypatch.setattr("sys.argv", ["gpu_stamp.py", "write", *arguments])
    return stamp.main()


def test_sources_that_passed_are_verified_until_their_code_changes(stamp, monkeypatch, capsys):
    assert write(stamp, monkeypatch, failed=0) == 0
    assert stamp.check() == 0
    stamp.source.write_text("// a comment alone\nint\n    x;\n")
    assert stamp.check() == 0
    stamp.source.write_text("int y;\n")
    assert stamp.check() == 1
    assert "make test-gpu" in capsys.readouterr().out


def test_what_failed_is_not_verified(stamp, monkeypatch, capsys):
    assert write(stamp, monkeypatch, failed=2) == 1
    assert stamp.check() == 1
    assert "2 of the processes failed" in capsys.readouterr().out


def test_unverified_says_why(stamp, capsys):
    stamp.STAMP.write_text(json.dumps({"status": "unverified", "why": "no GPU at hand"}))
    assert stamp.check() == 0
    assert "no GPU at hand" in capsys.readouterr().out
