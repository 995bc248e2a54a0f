#!/usr/bin/env bash
# Installs the Python package into .venv, if a file that it is made of has changed since the last time.
source "$(dirname "$0")/steps.sh"

digest=$(find include src python cmake CMakeLists.txt pyproject.toml -type f -not -name '*.pyc' -print0 |
  LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum)
stamp=.venv/installed-qkv
if [ "$(cat $stamp 2>/dev/null)" = "$digest" ]; then exit; fi

# The presets' compiler and warnings as errors: with the same command lines, ccache has the objects already.
export CC=${CC:-cc} CXX=${CXX:-c++}
step "Build and install the Python package" package .venv/bin/python -m pip install --disable-pip-version-check \
  --no-build-isolation --no-deps --config-settings=build-dir=build/python \
  --config-settings=cmake.define.CMAKE_COMPILE_WARNING_AS_ERROR=ON .
echo "$digest" >$stamp
