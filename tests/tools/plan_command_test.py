"""`qkv plan --json` as a script reads it:  plan_command_test.py PATH_OF_QKV  (a ctest)."""

import json
import subprocess
import sys
import unittest

QKV = sys.argv[1]


def report_of(*arguments):
    command = [QKV, "plan", *arguments, "--threads", "4", "--json", "-"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


class PlanCommand(unittest.TestCase):
    def test_each_request_has_its_lengths(self):
        report = report_of("q40s300_2q1s20k")
        self.assertEqual([40, 1, 1], report["query_lens"])
        self.assertEqual([300, 20480, 20480], report["seq_lens"])
        self.assertEqual(report["seq_lens"], report["key_lens"], "one rank is shown all keys")

    def test_items_of_a_request_cover_its_keys(self):
        report = report_of("q40s300_2q1s20k", "--heads", "8/2")
        for request, key_len in enumerate(report["key_lens"]):
            items = [item for item in report["items"] if request in item["requests"] and item["kv_head"] == 1]
            covered = set()
            for item in items:
                covered |= set(range(item["key_begin"], item["key_end"]))
            self.assertEqual(set(range(key_len)), covered, f"request {request}")


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
