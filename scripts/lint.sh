#!/usr/bin/env bash
# Format and lint, no file exempt. With --fix it formats instead.
source "$(dirname "$0")/steps.sh"

cpp_files() { find include src tools tests bench examples python \( -name '*.[ch]pp' -o -name '*.[ch]' -o -name '*.cuh' \) -print0; }

if [ "${1:-}" = --fix ]; then
  step "Format C++ (clang-format)" format-cpp bash -c "$(declare -f cpp_files); cpp_files | xargs -0 clang-format -i"
  step "Format Python (ruff)" format-python .venv/bin/ruff format
  step "Fix Python (ruff)" fix-python .venv/bin/ruff check --fix
  exit
fi

check_format() { cpp_files | xargs -0 clang-format --dry-run -Werror; }

# OpenMP is switched off here: clang would want its own omp.h, and no check looks at pragmas.
check_tidy() {
  find src tools -name '*.cpp' -print0 |
    xargs -0 -P "$JOBS" -n 1 clang-tidy --quiet -p build/release --extra-arg=-fno-openmp 2>&1 |
    sed '/^[0-9]* warnings\{0,1\} generated\.$/d'
}

step "Check the format of C++ (clang-format)" lint-format check_format
step "Check the format of Python (ruff)" lint-python-format .venv/bin/ruff format --check
step "Check Python (ruff)" lint-python .venv/bin/ruff check
if [ ! -f build/release/compile_commands.json ]; then
  configure release
fi
step "Check C++ (clang-tidy)" lint-tidy check_tidy
