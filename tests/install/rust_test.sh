#!/bin/sh
# Builds and runs examples/quickstart.rs as docs/c_api.md says:  rust_test.sh BINDGEN RUSTC SOURCE LIBRARY_FOLDER
set -eu
include=$3/include
"$1" "$include/qkv/qkv.h" --allowlist-function 'qkv_.*' --allowlist-type 'qkv_.*' --allowlist-var 'QKV_.*' \
  --no-prepend-enum-name --no-layout-tests -o qkv.rs -- "-I$include"
QKV_BINDINGS=$PWD "$2" --edition 2021 "$3/examples/quickstart.rs" -o quickstart_rust -L "native=$4" -l qkv
LD_LIBRARY_PATH=$4 ./quickstart_rust
