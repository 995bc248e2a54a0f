#!/usr/bin/env bash
# Builds and runs the benchmarks whose names match:  scripts/bench.sh REGEX.  Tables on the screen, JSON in build/bench.
source "$(dirname "$0")/steps.sh"

configure release -DQKV_BENCH=ON
build release
mkdir -p build/bench
for program in build/release/bench/*; do
  name=$(basename "$program")
  "$program" --benchmark_filter="$1" --benchmark_out="build/bench/$name.json" --benchmark_out_format=json
done
