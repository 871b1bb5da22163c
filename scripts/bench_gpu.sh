#!/usr/bin/env bash
# Builds, checks and runs the GPU benchmarks; leaves a JSON document of each in a folder.
#
#   scripts/bench_gpu.sh [FOLDER]    (default benchmarks/results)
#
# PYTHON, ISER_XLA_FFI_INCLUDE, ISER_SKIP_BUILD: as for scripts/test_gpu.sh; torch is needed too.
# GPUS: how many to use (default: all). ISER_COMMIT: what the sources are, without their history.
# BENCHMARKS: some of plan, replication, nccl, fused_moe, layer, baselines (default: all).
#
# Raw lines are in build/bench. A benchmark that fails or takes too long leaves the others alone.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$(command -v "${PYTHON:-python3}") || exit
folder=${1:-benchmarks/results}
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
raw=build/bench
bin=${ISER_CUDA_BUILD:-build/cuda}
mkdir -p "$raw" "$folder" || exit
failed=0

build() {
  tests/cuda/run.sh build &&
    cmake -S . -B build/gpu -GNinja -DPython_EXECUTABLE="$python" -DISER_CUDA=ON \
      ${ISER_XLA_FFI_INCLUDE:+"-DISER_XLA_FFI_INCLUDE=$ISER_XLA_FFI_INCLUDE"} &&
    cmake --build build/gpu --target _iser _iser_cuda
}

# The libraries of Python's CUDA packages, which the programs open.
library() {
  local packages
  packages=$("$python" -c 'import nvidia; print(*nvidia.__path__)' 2>/dev/null) || return 0
  # shellcheck disable=SC2086
  find $packages -name "$1.so.*" 2>/dev/null | head -n 1
}

lines() {  # NAME LIMIT command: its lines in $raw/NAME.jsonl
  local name=$1 limit=$2
  shift 2
  timeout "$limit" "$@" >"$raw/$name.jsonl" || { echo "failed ($?): $*" >&2 && failed=1; }
}

document() {  # NAME COMMAND FILES: $folder/cuda_NAME.json
  local name=$1 command=$2
  shift 2
  [[ -s ${1#*=} ]] || return 0
  "$python" benchmarks/_report.py "$folder/cuda_$name.json" --command "$command" "$@" || failed=1
}

bench_plan() {
  lines plan 60 "$bin/bench_plan" --gpus "$gpus"
  document plan "bench_plan --gpus $gpus" "$raw/plan.jsonl"
}

bench_replication() {
  local part
  for part in tune sizes beside; do
    lines "$part" 60 "$bin/bench_replication" --gpus "$gpus" "$part"
  done
  document replication "bench_replication --gpus $gpus" \
    tune="$raw/tune.jsonl" sizes="$raw/sizes.jsonl" beside="$raw/beside.jsonl"
}

bench_nccl() {
  lines nccl 60 "$python" benchmarks/cuda/bench_nccl.py
  document nccl "python3 benchmarks/cuda/bench_nccl.py" "$raw/nccl.jsonl"
}

bench_fused_moe() {
  lines fused_moe 300 "$bin/bench_fused_moe" --gpus "$gpus"
  document fused_moe "bench_fused_moe --gpus $gpus" "$raw/fused_moe.jsonl"
}

bench_layer() {
  timeout 150 "$python" benchmarks/cuda/bench_layer.py --json "$folder/cuda_layer.json" \
    2>"$raw/layer.txt" || { tail -n 20 "$raw/layer.txt" >&2 && failed=1; }
}

bench_baselines() {
  lines baselines 200 "$python" benchmarks/cuda/bench_baselines.py
  document baselines "python3 benchmarks/cuda/bench_baselines.py" "$raw/baselines.jsonl"
}

[[ ${ISER_SKIP_BUILD:-} == 1 ]] || build || exit
GPUS=$gpus tests/cuda/run.sh test || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} XLA_PYTHON_CLIENT_PREALLOCATE=false
export NCCL_NVLS_ENABLE=0 # never a multicast object
export ISER_CUBLAS_LIBRARY=${ISER_CUBLAS_LIBRARY:-$(library libcublas)}
export ISER_NCCL_LIBRARY=${ISER_NCCL_LIBRARY:-$(library libnccl)}
several=" replication nccl layer " # need two GPUs
for name in ${BENCHMARKS:-plan replication nccl fused_moe layer baselines}; do
  if [[ $several == *" $name "* && $gpus -lt 2 ]]; then
    echo "$name needs two GPUs" >&2
    continue
  fi
  echo "== $name" >&2
  "bench_$name"
done
exit "$failed"
