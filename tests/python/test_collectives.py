"""Ranks from Python: threads of this process, and processes under mpirun."""

import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import qkv


def run_ranks(num_ranks, body, **options):
    """What body(ranks) returned or raised on each rank; the rank leaves when its thread ends."""
    ends = qkv.in_process_ranks(num_ranks, **options)
    results = [None] * num_ranks

    def run(i, end):
        try:
            results[i] = body(end)
        except qkv.Error as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i, ends[i])) for i in range(num_ranks)]
    ends.clear()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_exchanges_between_threads(num_ranks):
    def body(ranks):
        n, rank = ranks.num_ranks, ranks.rank
        sent = [np.arange(n * 6, dtype=np.float32).reshape(n, 2, 3) + 100 * other for other in range(n)]
        gathered = np.zeros((n, n, 2, 3), np.float32)
        ranks.all_gather(sent[rank], gathered)
        np.testing.assert_array_equal(gathered, np.stack(sent))
        exchanged = np.zeros((n, 2, 3), np.float32)
        ranks.all_to_all(sent[rank], exchanged)
        np.testing.assert_array_equal(exchanged, np.stack([rows[rank] for rows in sent]))
        total = np.zeros((2, 3), np.float32)
        ranks.reduce_scatter(sent[rank], total)
        np.testing.assert_array_equal(total, sum(rows[rank] for rows in sent))
        return ranks.device

    assert run_ranks(num_ranks, body) == ["cpu"] * num_ranks


def test_bytes_of_8_bit_floats_arrive_as_they_are():
    ml_dtypes = pytest.importorskip("ml_dtypes")

    def body(ranks):
        send = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
        receive = np.zeros((2, 256), ml_dtypes.float8_e4m3fn)
        ranks.all_gather(send, receive)
        np.testing.assert_array_equal(receive.view(np.uint8), np.stack([send.view(np.uint8)] * 2))
        return "done"

    assert run_ranks(2, body) == ["done"] * 2


def test_rank_that_does_not_come_is_an_error_for_the_others():
    def body(ranks):
        if ranks.rank == 1:
            return "elsewhere"
        ranks.all_gather(np.zeros(1, np.float32), np.zeros((3, 1), np.float32))
        return "not reached"

    errors = run_ranks(3, body, timeout=0.5)
    assert errors[1] == "elsewhere"
    for error in (errors[0], errors[2]):
        assert isinstance(error, qkv.Error) and error.code == "unavailable"
        assert "rank 1" in error.value


def test_refusals_name_the_argument():
    (ranks,) = qkv.in_process_ranks(1)
    with pytest.raises(qkv.Error, match=r"receive: got f32\[2\]"):
        ranks.all_gather(np.zeros(2, np.float32), np.zeros(2, np.float32))
    with pytest.raises(qkv.Error, match="send"):
        ranks.all_gather("no tensor", np.zeros(2, np.float32))
    with pytest.raises(qkv.Error, match="timeout: got"):
        qkv.in_process_ranks(1, timeout=float("nan"))
    with pytest.raises(qkv.Error, match="num_ranks: got 0"):
        qkv.in_process_ranks(0)
    with pytest.raises(qkv.Error, match="id: got 3 bytes"):
        qkv.nccl_ranks(b"abc", 1, 0, 0)
    with pytest.raises(qkv.Error, match="rank: got 2"):
        qkv.nccl_ranks(bytes(128), 2, 2, 0)


PROGRAM = """
import numpy as np
import qkv
ranks = qkv.mpi_ranks(timeout=30)
total = np.zeros(3, np.float32)
ranks.reduce_scatter(np.full((ranks.num_ranks, 3), ranks.rank + 1, np.float32), total)
assert (total == sum(range(1, ranks.num_ranks + 1))).all(), total
"""


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun")
@pytest.mark.skipif("ranks by MPI           libqkv_mpi.so: got" in qkv.info(), reason="built without MPI")
def test_processes_of_mpirun_exchange():
    environment = os.environ | {"OMPI_MCA_btl_vader_single_copy_mechanism": "none", "OMPI_MCA_plm_rsh_agent": "false"}
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", "2", sys.executable, "-c", PROGRAM]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stdout + result.stderr
