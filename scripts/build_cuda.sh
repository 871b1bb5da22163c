#!/usr/bin/env bash
# Builds the CUDA extension beside the sources, and its test programs, with the tools of .venv; then
# tries what needs no GPU: that the module loads and that programs lower for a GPU.
#
#   scripts/build_cuda.sh    (make cuda)
#
# Needs nvcc (CUDA 13) on PATH or in CUDACXX. Leaves the environments' installed packages alone.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$PWD/.venv/bin
"$bin/cmake" -S . -B build/cuda-extension -GNinja -DCMAKE_MAKE_PROGRAM="$bin/ninja" \
  -DPython_EXECUTABLE="$bin/python" -DISER_CUDA=ON -DISER_WERROR=ON
"$bin/ninja" -C build/cuda-extension
PYTHONPATH=. "$bin/python" -m pytest -q tests/test_cuda_module.py
