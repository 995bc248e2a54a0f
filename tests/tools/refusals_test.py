"""What `qkv` says of mistaken commands: one line with what was given and what is allowed.

refusals_test.py PATH_OF_QKV  (a ctest)"""

import subprocess
import sys
import unittest

QKV = sys.argv[1]


class Refusals(unittest.TestCase):
    def refused(self, command, given, allowed):
        result = subprocess.run([QKV, *command], capture_output=True, text=True)
        self.assertNotEqual(0, result.returncode, command)
        self.assertIn(f"got {given}; allowed: {allowed}", result.stderr)

    def test_words_that_are_no_commands(self):
        self.refused(["foo"], "foo", "info, matrix, cache")
        self.refused(["maks", "causal"], "maks", "info, ")
        self.refused([], "no command", "info, ")
        self.refused(["cache", "foo"], "foo", "ls, verify, clear, export, import")
        self.refused(["cache"], "no command", "ls, ")

    def test_options_that_there_are_not(self):
        self.refused(["mask", "causal", "--qlen", "3"], "--qlen", "what qkv mask --help lists")

    def test_numbers_out_of_range_and_words_for_numbers(self):
        for value in ("-1", "abc", "99999999999", "3x"):
            self.refused(["mask", "causal", "--q-len", value], value, "a whole number from 0 to 2147483647")
        self.refused(["check", "--seed", "-1"], "-1", "a whole number from 0 to ")
        self.refused(["replay", "trace.csv", "--speed", "0"], "0", "a number above 0")

    def test_operands_of_another_length(self):
        command = ["mask", "document & causal", "--q-len", "4", "--operand", "key_document=0*4"]
        for count in (3, 5):
            given = f"{count} values of query_document, which needs 4 (one a new token)"
            self.refused([*command, "--operand", f"query_document=0*{count}"], given, "so many values")

    def test_shared_prefixes_of_requests_that_there_are_not(self):
        self.refused(["plan", "64q1s10k", "--shared", "0-64:4k"], "0-64:4k", "requests 0 to 63")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
