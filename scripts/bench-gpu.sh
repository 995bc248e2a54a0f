#!/usr/bin/env bash
# Measures on this machine's GPU, beside its peers:  scripts/bench-gpu.sh [TABLE ...]. Results in bench/results/<device>.
source "$(dirname "$0")/steps.sh"

if ! .venv/bin/python -c 'import torch; assert torch.version.cuda' 2>/dev/null; then
  echo "The peers are PyTorch's, which is too big to be installed for you:  .venv/bin/python -m pip install torch" >&2
  echo "Decode's limit and the clocks need cupy too (cupy-cuda13x)." >&2
  exit 1
fi
.venv/bin/python bench/gpu.py "$@"
