"""`qkv warmup`, `qkv why` and `qkv cache` as a user runs them:  warmup_command_test.py PATH_OF_QKV  (a ctest)."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest

QKV = sys.argv[1]
MODELS = pathlib.Path(__file__).resolve().parent / "models"
# On sm_80: few rows, those of several requests, many rows, merge_plan_states, cache_write.
NUM_KERNELS = 5
NUM_PROCESSES = 8


class Commands(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)
        self.root = pathlib.Path(self.folder.name)
        self.cache = self.root / "cache"
        # Small heads compile in a fraction of a second.
        config = json.loads((MODELS / "llama.json").read_text()) | {"head_dim": 16}
        self.config = self.root / "config.json"
        self.config.write_text(json.dumps(config))

    def start(self, *arguments, cache=None, **environment):
        environment = os.environ | {"QKV_CACHE_DIR": str(cache or self.cache)} | environment
        return subprocess.Popen(
            [QKV, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def run_qkv(self, *arguments, cache=None, status=0, **environment):
        process = self.start(*arguments, cache=cache, **environment)
        out, err = process.communicate(timeout=300)
        self.assertEqual(status, process.returncode, out + err)
        return out + err

    def warm_up(self, **options):
        return self.run_qkv("warmup", "--model", self.config, "--arch", "sm_80", **options)

    def entries(self):
        return sorted(self.cache.glob("*.kernel"))

    def test_casebook_113_progress_names_each_kernel_and_a_second_run_compiles_nothing(self):
        first = self.warm_up()
        self.assertIn(f"[1/{NUM_KERNELS}]", first)
        self.assertIn(f"[{NUM_KERNELS}/{NUM_KERNELS}]", first)
        self.assertIn("cache_write sm_80", first)
        self.assertIn(f"{NUM_KERNELS} kernels: {NUM_KERNELS} compiled, 0 were there, 0 failed", first)
        self.assertIn(f"cache: {self.cache}", first)
        start = time.monotonic()
        second = self.warm_up()
        self.assertIn(f"0 compiled, {NUM_KERNELS} were there", second)
        self.assertLess(time.monotonic() - start, 5)

    def test_casebook_103_no_compiler_but_nvrtc_is_asked_for(self):
        nothing = {"PATH": "", "CUDA_HOME": ":/usr/local/cuda"}
        self.assertIn("cpu in use", self.run_qkv("info", **nothing))
        self.assertIn("3 passed, 0 failed", self.run_qkv("check", "--cases", 3, **nothing))
        self.assertIn("0 failed", self.warm_up(**nothing))
        self.assertIn("pip install nvidia-cuda-nvrtc", self.warm_up(QKV_NVRTC="/none", status=1))

    def test_casebook_107_other_path_working_folder_and_times_are_no_reason_to_compile(self):
        self.warm_up()
        for entry in self.entries():
            os.utime(entry, (0, 0))
        self.assertIn("0 compiled", self.warm_up(PATH="/elsewhere", HOME="/another/home", CUDA_HOME="/usr/local/cuda/"))

    def test_bounds_compile_less(self):
        out = self.run_qkv("warmup", "--model", self.config, "--arch", "sm_80", "--max-model-len", 1, "--jobs", 1)
        self.assertIn(f"{NUM_KERNELS - 2} kernels", out)
        self.assertNotIn("shared_rows 1", out)
        self.assertEqual(1, out.count("forward_sm80"))

    def test_reach_is_exact(self):
        out = self.warm_up()
        for unreached in ("gather", "merge_states", "cache_quantise", "plan_batch"):
            self.assertNotIn(f"{unreached} ", out)
        device = self.run_qkv("warmup", "--model", self.config, "--arch", "sm_80", "--planners", "device")
        self.assertIn("plan_batch ", device)
        self.assertIn("1 compiled", device)
        scaled = self.run_qkv(
            *("warmup", "--model", self.config, "--arch", "sm_80"), *("--kv-dtype", "f8e4m3", "--kv-scales", "per_head")
        )
        self.assertIn("cache_quantise ", scaled)
        self.assertNotIn("cache_write ", scaled)
        self.assertIn("f8e4m3 scales per_head", scaled)

    def test_latent_layers_bring_what_their_chunk_loop_runs(self):
        config = json.loads((MODELS / "deepseek_v3.json").read_text())
        small = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 600}
        self.config.write_text(json.dumps(config | small))
        out = self.run_qkv("warmup", "--model", self.config, "--arch", "sm_80", "--tp", 64)
        for kernel in ("gather ", "merge_states ", "cache_write ", "bf16->f32 d24/16", "bf16->bf16 d24/16"):
            self.assertIn(kernel, out)
        self.assertIn("skipped: latent attention, absorbed: decode", out)
        self.assertIn(
            "cache_quantise ",
            self.run_qkv("warmup", "--model", self.config, "--arch", "sm_80", "--tp", 64, "--kv-dtype", "f8e4m3"),
        )
        self.assertIn("the model's dtype, or 8 bits", self.why_not("--kv-dtype", "f16"))

    def why_not(self, *options):
        return self.run_qkv("why", "--model", self.config, "--arch", "sm_80", *options, status=2)

    def test_skipped_layers_are_told_with_the_reason(self):
        out = self.run_qkv("why", "--model", MODELS / "deepseek_v3.json", "--arch", "sm_90a")
        self.assertIn("refused on a GPU: head_dim: got 576", out)
        self.assertIn("forward_sm90_many_rows", out)
        out = self.run_qkv("warmup", "--model", self.config, "--arch", "sm_80", "--dtype", "f32")
        self.assertIn("skipped: full attention (layers 0-31): query_dtype: got f32", out)

    def test_bad_calls_are_refused(self):
        self.assertIn("no file", self.run_qkv("warmup", "--model", "none.json", "--arch", "sm_80", status=2))
        self.assertIn("sm_90a", self.run_qkv("warmup", "--model", self.config, "--arch", "sm_1", status=2))
        self.assertIn("divisor", self.run_qkv("why", "--model", self.config, "--arch", "sm_80", "--tp", 5, status=2))

    def test_archive_serves_another_folder(self):
        self.warm_up()
        archive = self.root / "kernels.qkv"
        self.assertIn(f"{NUM_KERNELS} kernels", self.run_qkv("cache", "export", archive))
        self.assertIn(f"{NUM_KERNELS} kernels deleted", self.run_qkv("cache", "clear"))
        self.assertEqual([], self.entries())
        other = self.root / "another machine"
        self.assertIn(f"{NUM_KERNELS} kernels added", self.run_qkv("cache", "import", archive, cache=other))
        self.assertIn("0 compiled", self.warm_up(cache=other))

    def test_casebook_109_damaged_entries_are_found_told_and_replaced(self):
        self.warm_up()
        empty, flipped = self.entries()[:2]
        empty.write_bytes(b"")
        content = bytearray(flipped.read_bytes())
        content[len(content) // 2] ^= 16
        flipped.write_bytes(content)
        listed = self.run_qkv("cache", "ls")
        self.assertIn(f"{empty}: it is empty", listed)
        self.assertIn("2 damaged", self.run_qkv("cache", "verify", status=1))
        out = self.warm_up()
        self.assertIn("2 compiled", out)
        self.assertEqual(2, out.count("is not used"))
        self.assertIn(f"{NUM_KERNELS} sound, 0 damaged", self.run_qkv("cache", "verify"))

    def test_casebook_104_processes_at_once_on_an_empty_folder(self):
        processes = [self.start("warmup", "--model", self.config, "--arch", "sm_80") for _ in range(NUM_PROCESSES)]
        compiled = 0
        for process in processes:
            out, err = process.communicate(timeout=300)
            self.assertEqual(0, process.returncode, out + err)
            compiled += int(out.split(" compiled")[0].split()[-1])
        self.assertEqual(NUM_KERNELS, compiled)
        self.assertIn(f"{NUM_KERNELS} sound, 0 damaged", self.run_qkv("cache", "verify"))

    def test_killed_compiles_leave_nothing_behind_that_counts(self):
        rng = random.Random(3)
        for _ in range(5):
            processes = [self.start("warmup", "--model", self.config, "--arch", "sm_80") for _ in range(3)]
            for process in processes[:2]:
                time.sleep(rng.uniform(0, 0.5))
                process.send_signal(signal.SIGKILL)
            for process in processes:
                process.communicate(timeout=300)
            self.assertEqual(0, processes[2].returncode)
            self.assertIn("0 damaged", self.run_qkv("cache", "verify"))
            self.run_qkv("cache", "clear")

    def test_folder_that_cannot_be_written_is_said_and_done_without(self):
        blocked = self.root / "file"
        blocked.write_text("")
        out = self.warm_up(cache=blocked / "cache")
        self.assertIn("0 failed", out)
        self.assertEqual(1, out.count("kernels are compiled and not kept"))


if __name__ == "__main__":
    info = subprocess.run([QKV, "info"], check=True, capture_output=True, text=True).stdout
    if "libnvrtc: got" in info or "QKV_NVRTC: got" in info:
        print("skipped: needs NVRTC")
        sys.exit(0)
    unittest.main(argv=sys.argv[:1])
