#!/usr/bin/env bash
# Builds the extension with its CUDA ops beside the sources and runs on this machine's GPUs what is
# marked `gpu` in tests/gpu and tests/test_cuda_memory.py.
#
#   scripts/test_gpu.sh [pytest arguments]    (make test-gpu)
#
# PYTHON: an interpreter with jax for CUDA, cuda-python, flax, nanobind, pytest, pytest-timeout and
# hypothesis (default python3); cmake, ninja and nvcc (CUDA 13) are on PATH.
# ISER_XLA_FFI_INCLUDE: headers of jaxlib 0.10.1, where that interpreter has a newer one.
# ISER_SKIP_BUILD=1: the extension is there already.
#
# A test that hangs or costs its process the GPU ends that process; another goes on behind it.
set -euo pipefail
cd "$(dirname "$0")/.."
python=$(command -v "${PYTHON:-python3}")
python=$(cd "$(dirname "$python")" && pwd)/$(basename "$python")
build=build/gpu

if [[ ${ISER_SKIP_BUILD:-} != 1 ]]; then
  cmake -S . -B "$build" -GNinja -DPython_EXECUTABLE="$python" -DISER_CUDA=ON \
    ${ISER_XLA_FFI_INCLUDE:+"-DISER_XLA_FFI_INCLUDE=$ISER_XLA_FFI_INCLUDE"}
  cmake --build "$build" --target _iser _iser_cuda
fi

export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu}
ISER_TEST_LOG=$(mktemp)
export ISER_TEST_LOG
trap 'rm -f "$ISER_TEST_LOG"' EXIT
failed=0
for attempt in 1 2 3 4 5 6; do
  rc=0
  "$python" -m pytest tests/gpu tests/test_cuda_memory.py -m gpu -p no:xdist -p no:cacheprovider \
    -o timeout=60 -o timeout_method=thread --tb=short --durations=15 "$@" || rc=$?
  # 5: nothing is left, or nothing was asked for.
  [[ $rc == 0 || ($rc == 5 && $attempt != 1) ]] || failed=$rc
  [[ $(tail -n 1 "$ISER_TEST_LOG") != finished ]] || break
  [[ $rc != 2 && $rc != 4 ]] || break # interrupted, or wrong arguments
  echo "== pytest ended with $rc in $(tail -n 1 "$ISER_TEST_LOG"); another one goes on behind it" >&2
done
exit "$failed"
