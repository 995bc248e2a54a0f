"""Ranks of MPI as processes: what they exchange, and what happens when one is late, leaves or dies.

Run as  mpi_test.py MPI_RANKS PLUGIN QKV  (a ctest), with the program of mpi_ranks.cpp, libqkv_mpi.so and the command.
"""

import os
import re
import shutil
import subprocess
import sys
import time
import unittest

PROGRAM, PLUGIN, QKV = sys.argv[1:4]

# As root, in containers without ptrace between processes, on machines of fewer cores than ranks; no ssh anywhere.
MPIRUN = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--mca", "plm_rsh_agent", "false"]
ENVIRONMENT = os.environ | {
    "QKV_MPI_LIBRARY": PLUGIN,
    "OMPI_MCA_btl_vader_single_copy_mechanism": "none",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "QKV_THREADS": "1",
    # MPI keeps memory to the end; and where a rank is killed nobody can free anything.
    "ASAN_OPTIONS": "detect_leaks=0",
}


def run(num_ranks, *arguments, program=PROGRAM):
    command = [*MPIRUN, "-n", str(num_ranks), program, *arguments]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=100)


def lines_of(result):
    """What each rank said, in the order of ranks."""
    said = re.findall(r"^rank (\d+): (.*)$", result.stdout, re.MULTILINE)
    return [text for _, text in sorted(said, key=lambda line: int(line[0]))]


class MpiRanks(unittest.TestCase):
    def check(self, result, expected):
        self.assertEqual(expected, lines_of(result), result.stdout + result.stderr)

    def test_exchanges_follow_the_definition(self):
        for num_ranks in (1, 2, 3, 4):
            result = run(num_ranks, "exchange")
            self.check(result, ["done"] * num_ranks)
            self.assertEqual(0, result.returncode, result.stderr)

    def test_context_parallel_layers_follow_the_definition(self):
        for num_ranks in (2, 4):
            result = run(num_ranks, "check", "--mpi", "--cases", "40", "--seed", "3", program=QKV)
            self.assertEqual(0, result.returncode, result.stdout + result.stderr)
            self.assertIn("40 passed, 0 failed", result.stdout)

    def test_late_rank_is_named_to_all_others_and_later_calls_fail_too(self):
        lines = lines_of(run(4, "late"))
        self.assertGreaterEqual(len(lines), 6, lines)  # mpirun may end the late one before it speaks
        for line in lines[:6]:
            self.assertRegex(line, r"^(all_gather|check): got no rank 3 within 1 s; allowed: every rank")

    def test_rank_that_leaves_is_named_to_the_others_at_once(self):
        start = time.monotonic()
        lines = lines_of(run(3, "leave"))
        self.assertEqual(2, len(lines), lines)
        for line in lines:
            self.assertRegex(line, "^all_gather: got rank 2, which has left; allowed: every rank")
        self.assertLess(time.monotonic() - start, 30)

    def test_rank_that_dies_ends_the_job(self):
        result = run(3, "die")
        self.assertNotEqual(0, result.returncode)
        self.assertNotIn("done", result.stdout)

    def test_ranks_in_different_operations_are_told_who_is_in_which(self):
        lines = lines_of(run(2, "differ"))
        self.assertTrue(lines)
        for line in lines:
            self.assertRegex(line, "all_gather of 200000 bytes a rank by rank 0")
            self.assertRegex(line, "all_to_all of 280000 bytes a rank by rank 1")

    def test_ranks_with_different_shapes_are_told(self):
        lines = lines_of(run(2, "differ_in_shape"))
        self.assertTrue(lines)
        for line in lines:
            self.assertRegex(
                line,
                "all_gather of 40 bytes a rank by rank 1, all_gather of 48 bytes a rank by rank 0|"
                "all_gather of more than 40 bytes a rank by rank 0, all_gather of 40 bytes a rank by rank 1",
            )

    def test_slow_rank_is_waited_for_and_groups_can_be_made_again(self):
        self.check(run(2, "again"), ["done"] * 6)

    def test_rows_that_mpi_cannot_count_are_refused(self):
        refused = (
            "send: got 2147483648 bytes a rank; allowed: at most 2147483647 bytes a rank through MPI: cut the tensor"
        )
        self.check(run(2, "refuse_large"), [refused, "done"] * 2)

    def test_communicator_of_the_caller_is_duplicated_and_stays_the_callers(self):
        lines = lines_of(run(3, "bring_communicator"))
        self.assertEqual(3, lines.count("done"), lines)
        finalised = "mpi_ranks: got MPI has been finalised: it cannot be used any more; allowed: "
        self.assertEqual(3, sum(line.startswith(finalised) for line in lines), lines)

    def test_handle_of_no_communicator_is_refused(self):
        lines = lines_of(run(1, "refuse_handle"))
        self.assertEqual(1, len(lines))
        self.assertRegex(lines[0], "^mpi_ranks: got MPI_ERR_COMM: invalid communicator; allowed: .*MPI_Comm_c2f")


if __name__ == "__main__":
    if shutil.which("mpirun") is None:
        print("needs mpirun (Debian: apt-get install openmpi-bin)")
        sys.exit(0)
    unittest.main(argv=sys.argv[:1] + sys.argv[4:])
