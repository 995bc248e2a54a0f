#!/usr/bin/env bash
# The GPU tests, on a machine that has one:  scripts/test-gpu.sh [FOLDER]. Leaves tests/gpu/verified.json.
# FOLDER holds the programs qkv and test_gpu, where they were built elsewhere; else they are built here.
# CASES=5000 SEED=1 say how many random cases are compared with the oracle.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-}
if [ -z "$folder" ]; then
  source scripts/steps.sh
  configure release
  build release qkv_tool test_gpu
  folder=build/release
fi
test_gpu=$(find "$folder" -name test_gpu -type f | head -n 1)
log=$(mktemp)

"$folder/qkv" info
failed=0
"$test_gpu" --gtest_brief=1 2>&1 | tee "$log" || failed=1
tests=$(sed -n 's/^\[  PASSED  \] \([0-9]*\) test.*/\1/p' "$log" | tail -n 1)
"$folder/qkv" check --device cuda --cases "${CASES:-5000}" --seed "${SEED:-1}" 2>&1 | tee "$log" || failed=1
cases=$(sed -n 's/^\([0-9]*\) passed, .*/\1/p' "$log" | tail -n 1)
if grep -q 'device 0' <<<"$("$folder/qkv" info)"; then
  description=$("$folder/qkv" info | sed -n 's/.*device 0: \([^,]*\),.*/\1/p')
  driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
  python3 scripts/gpu_stamp.py write --device "$description" --driver "$driver" \
    --passed $((${tests:-0} + ${cases:-0})) --failed $failed
else
  echo "No GPU was found: nothing is verified." >&2
  exit 1
fi
