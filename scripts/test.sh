#!/usr/bin/env bash
# Everything that must hold before a change is pushed; CI runs the same.  scripts/test.sh [all|asan|tsan]
source "$(dirname "$0")/steps.sh"

passed=0 skipped=0

# Adds ctest's and pytest's closing lines up. A step that failed has ended the script before.
count_ctest() {
  local total skips
  total=$(sed -n 's/.* tests failed out of \([0-9]*\)$/\1/p' "$LOGS/$1.log")
  skips=$(grep -c '\*\*\*Skipped' "$LOGS/$1.log" || true)
  passed=$((passed + total - skips)) skipped=$((skipped + skips))
}
count_pytest() {
  local line
  line=$(tail -n 1 "$LOGS/$1.log")
  passed=$((passed + $(grep -o '[0-9]* passed' <<<"$line" | cut -d' ' -f1)))
  if [[ $line =~ ([0-9]+)\ skipped ]]; then skipped=$((skipped + BASH_REMATCH[1])); fi
}

# What fails runs once more, alone and last, so that the end of the log shows it.
run_tests() {
  ctest --preset "$1" --parallel "$JOBS" --no-tests=error && return
  printf '\n--- once more, what failed:\n'
  ctest --preset "$1" --rerun-failed || true
  return 1
}

# run_ctest PRESET TARGET TITLE [-DOPTION=VALUE...]
run_ctest() {
  local preset=$1 title=$3
  configure "$preset" "${@:4}"
  build "$preset" "$2"
  step "$title" "test-$preset" run_tests "$preset"
  count_ctest "test-$preset"
}

test_release() {
  # The benchmarks are compiled here too, so that they do not rot.
  run_ctest release all "Test C++, the arrows between rooms, and an installed copy" -DQKV_BENCH=ON
}
test_python() {
  scripts/package.sh
  step "Test Python" test-python .venv/bin/python -m pytest -q tests/python
  count_pytest test-python
}
test_gpu_stamp() {
  step "Compare the GPU sources with those tested on a GPU" gpu-stamp python3 scripts/gpu_stamp.py check
}
test_asan() { run_ctest asan all "Test C++ under AddressSanitizer and UndefinedBehaviorSanitizer"; }
test_tsan() { run_ctest tsan thread_tests "Test what uses threads under ThreadSanitizer"; }

case ${1:-all} in
  all) test_release; test_python; scripts/lint.sh; test_gpu_stamp; test_asan; test_tsan ;;
  asan) test_asan ;;
  tsan) test_tsan ;;
  *) echo "test.sh: unknown part '$1'; allowed: all, asan, tsan" >&2; exit 2 ;;
esac

summary="$passed passed, 0 failed"
if [ $skipped -gt 0 ]; then summary+=", $skipped skipped"; fi
echo "$summary"
