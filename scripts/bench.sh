#!/usr/bin/env bash
# Measures on this machine:  scripts/bench.sh REGEX.  Tables on the screen; JSON and pictures in bench/results/<device>.
# Rows that REGEX leaves out are left out of the files too.
source "$(dirname "$0")/steps.sh"

configure release -DQKV_BENCH=ON
build release bench_forward bench_ops bench_shared_prefix
commit=$(git describe --always --dirty 2>/dev/null || echo unknown)
for suite in forward ops shared_prefix; do
  build/release/bench/$suite --filter "$1" --commit "$commit" --out bench/results | tee build/bench-$suite.log
  .venv/bin/python bench/plot.py "$(sed -n 's/^written: //p' build/bench-$suite.log)"
done
folder=$(dirname "$(sed -n 's/^written: //p' build/bench-ops.log)")
.venv/bin/python bench/torch_peers.py --commit "$commit" --out "$folder/torch.json"
