# Sourced by the other scripts: `step` runs a command quietly and shows its log only if it fails.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
LOGS=build/logs
JOBS=${JOBS:-$(nproc)}
mkdir -p "$LOGS"

# step TITLE LOG COMMAND...
step() {
  local title=$1 log=$LOGS/$2.log start=$SECONDS status=0
  shift 2
  printf '%-64s' "$title"
  "$@" >"$log" 2>&1 </dev/null || status=$?
  if [ $status -eq 0 ]; then
    printf 'ok %5d s\n' $((SECONDS - start))
    return
  fi
  printf 'FAILED (exit status %d)\n' $status
  printf '\n--- the end of %s:\n' "$log"
  tail -n 150 "$log"
  printf '\n--- failed: %s\n    command:  %s\n    full log: %s\n' "$title" "$*" "$log"
  exit $status
}

# configure PRESET [-DOPTION=VALUE...] and build PRESET [TARGET...] work in build/PRESET.
configure() { step "Configure build/$1" "configure-$1" cmake --preset "$@"; }
build() {
  local targets=()
  if [ $# -gt 1 ]; then targets=(--target "${@:2}"); fi
  step "Build build/$1" "build-$1" cmake --build --preset "$1" --parallel "$JOBS" "${targets[@]}"
}
