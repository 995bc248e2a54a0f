#!/usr/bin/env bash
# The GPU tests, on a machine that has one:  scripts/test-gpu.sh [FOLDER]. Leaves tests/gpu/verified.json.
# FOLDER holds the programs qkv and test_gpu, where they were built elsewhere; else they are built here.
#   CASES=5000 SEED=1  random cases that are compared with the float64 definition
#   JOBS=16            processes beside one another (default: one a processor): most of the time goes to compiling
#                      kernels and to the definition, on the CPU. Some 85 minutes of processor time in all
#   LIMIT=3600         seconds after which a process is ended, and has failed
set -euo pipefail
cd "$(dirname "$0")/.."
folder=${1:-}
if [ -z "$folder" ]; then
  source scripts/steps.sh
  configure release
  build release qkv_tool test_gpu
  folder=build/release
fi
qkv=$folder/qkv
test_gpu=$(find "$folder" -name test_gpu -type f | head -n 1)
JOBS=${JOBS:-$(nproc)}
LIMIT=${LIMIT:-3600}
logs=build/logs/test-gpu
rm -rf "$logs"
mkdir -p "$logs" build/test-gpu-kernels
export QKV_CACHE_DIR=$PWD/build/test-gpu-kernels QKV_CACHE_MB=4096 OMP_NUM_THREADS=1

info=$("$qkv" info)
echo "$info"
if ! grep -q 'device 0' <<<"$info"; then
  echo "No GPU was found: nothing is verified." >&2
  exit 1
fi

# What a process has said: passed tests, or passed cases.
passed_in() { sed -nE 's/^\[  PASSED  \] ([0-9]+) test.*/\1/p; s/^([0-9]+) passed, .*/\1/p' "$1" | tail -n 1; }

# run NAME COMMAND... waits for a free place, and says how the command has ended when it has.
run() {
  local name=$1 start status=0
  shift
  while [ "$(jobs -rp | wc -l)" -ge "$JOBS" ]; do wait -n || true; done
  {
    start=$SECONDS
    timeout "$LIMIT" "$@" >"$logs/$name.log" 2>&1 </dev/null || status=$?
    passed=$(passed_in "$logs/$name.log")
    if [ $status -eq 0 ]; then
      printf 'ok      %5d passed %5d s  %s\n' "${passed:-0}" $((SECONDS - start)) "$name"
    else
      printf 'FAILED  exit status %d after %d s: %s\n' $status $((SECONDS - start)) "$logs/$name.log"
      echo "$name" >>"$logs/failed"
    fi
  } &
}

gpus=$(nvidia-smi --list-gpus | wc -l)
check() { run "$1" env "CUDA_VISIBLE_DEVICES=$((gpus - 1))" "${@:2}"; }

# Warm-up is tested from an empty folder of kernels. All else is a process a test, from the end of the list: there are
# those of many kernels, and what runs long should not begin last.
run warm-up env QKV_CACHE_DIR="$PWD/$logs/kernels" "$test_gpu" --gtest_brief=1 --gtest_filter='gpu_warmup*'
"$test_gpu" --gtest_list_tests --gtest_filter='-gpu_warmup*' |
  awk '/^[^ ]/ { suite = $1 } /^ / { print suite $1 }' | tac >"$logs/tests"
while read -r name; do
  run "${name//\//-}" "$test_gpu" --gtest_brief=1 --gtest_filter="$name"
done <"$logs/tests"
cases=${CASES:-5000}
piece=500
for ((first = 0; first < cases; first += piece)); do
  check "check-from-$first" "$qkv" check --device cuda --seed "${SEED:-1}" --first $first \
    --cases $((cases - first < piece ? cases - first : piece))
done
check check-2-ranks "$qkv" check --device cuda --ranks 2 --cases 40
check check-4-ranks "$qkv" check --device cuda --ranks 4 --cases 40
check check-mla "$qkv" check --device cuda --mla --cases 150
if command -v compute-sanitizer >/dev/null; then
  check memcheck compute-sanitizer --tool memcheck --error-exitcode 9 "$qkv" check --device cuda --cases 20 --first 9000
else
  echo "left out: memcheck (compute-sanitizer, of the CUDA toolkit, is not on the PATH)"
fi
if [ "$gpus" -ge 2 ]; then
  run check-nccl "$qkv" check --device cuda --nccl --cases 60
else
  echo "left out: check-nccl (it wants two GPUs)"
fi
wait

passed=0
for log in "$logs"/*.log; do
  count=$(passed_in "$log")
  passed=$((passed + ${count:-0}))
done
failed=0
if [ -f "$logs/failed" ]; then
  failed=$(wc -l <"$logs/failed")
  while read -r name; do
    printf '\n--- the end of %s\n' "$logs/$name.log"
    tail -n 40 "$logs/$name.log"
  done <"$logs/failed"
fi
description=$(sed -n 's/.*device 0: \([^,]*\),.*/\1/p' <<<"$info")
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1)
python3 scripts/gpu_stamp.py write --device "$description" --driver "$driver" --passed $passed --failed "$failed"
