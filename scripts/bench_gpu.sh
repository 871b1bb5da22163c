#!/usr/bin/env bash
# Builds, checks and runs the GPU benchmarks; leaves a JSON document of each in a folder.
#
#   scripts/bench_gpu.sh [FOLDER]    (default benchmarks/results)
#
# PYTHON, ISER_XLA_FFI_INCLUDE, ISER_SKIP_BUILD: as for scripts/test_gpu.sh; torch is needed too.
# GPUS: how many to use (default: all). ISER_COMMIT: what the sources are, without their history.
# BENCHMARKS: some of plan, replication, nccl, fused_moe, products, epilogues, layer, baselines
# (default: all).
# ALLOW_DIRTY=1: sources that differ from their commit; the documents are marked -dirty.
# RAW: where raw lines go (default build/bench).
#
# Each document has the commands as they were run, date, device, versions and the commit of the
# start. A benchmark that fails or takes too long leaves the others alone.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
python=$(command -v "${PYTHON:-python3}") || exit
folder=${1:-benchmarks/results}
gpus=${GPUS:-$(nvidia-smi -L | wc -l)}
raw=${RAW:-build/bench}
dirty=()
[[ ${ALLOW_DIRTY:-} == 1 ]] && dirty=(--allow-dirty)
# Before anything is built: figures without a commit cannot be recorded.
ISER_COMMIT=$("$python" benchmarks/_report.py --check "${dirty[@]}") || exit
export ISER_COMMIT
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

lines() {  # NAME LIMIT command: its lines in $raw/NAME.jsonl, itself in NAME.command
  local name=$1 limit=$2
  shift 2
  echo "$*" >"$raw/$name.command"
  timeout "$limit" "$@" >"$raw/$name.jsonl" || { echo "failed ($?): $*" >&2 && failed=1; }
}

document() {  # NAME [GROUP=]PART...: $folder/cuda_NAME.json of these parts' lines
  local name=$1 part commands=() files=()
  shift
  for part in "$@"; do
    [[ -s $raw/${part#*=}.jsonl ]] || continue
    commands+=("$(<"$raw/${part#*=}.command")")
    [[ $part == *=* ]] && files+=("${part%%=*}=$raw/${part#*=}.jsonl") || files+=("$raw/$part.jsonl")
  done
  [[ ${#files[@]} -gt 0 ]] || return 0
  local all
  all=$(printf '%s; ' "${commands[@]}")
  "$python" benchmarks/_report.py "$folder/cuda_$name.json" --command "${all%; }" "${dirty[@]}" \
    "${files[@]}" || failed=1
}

bench_plan() {
  lines plan 60 "$bin/bench_plan" --gpus "$gpus"
  document plan plan
}

bench_replication() {
  local part
  for part in tune sizes beside; do
    lines "$part" 60 "$bin/bench_replication" --gpus "$gpus" "$part"
  done
  document replication tune=tune sizes=sizes beside=beside
}

bench_nccl() {
  lines nccl 60 "$python" benchmarks/cuda/bench_nccl.py
  document nccl nccl
}

bench_fused_moe() {
  lines fused_moe 300 "$bin/bench_fused_moe" --gpus "$gpus" dense share fp8 ranks pair
  document fused_moe fused_moe
}

bench_products() {
  lines products 120 "$bin/bench_fused_moe" products
  document products products
}

bench_epilogues() {
  lines epilogues 180 "$bin/bench_fused_moe" epilogues tails
  document epilogues epilogues
}

bench_layer() {
  timeout 150 "$python" benchmarks/cuda/bench_layer.py --json "$folder/cuda_layer.json" \
    "${dirty[@]}" 2>"$raw/layer.txt" || { tail -n 20 "$raw/layer.txt" >&2 && failed=1; }
}

bench_baselines() {
  lines baselines 200 "$python" benchmarks/cuda/bench_baselines.py
  document baselines baselines
}

[[ ${ISER_SKIP_BUILD:-} == 1 ]] || build || exit
GPUS=$gpus tests/cuda/run.sh test || exit
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
export JAX_PLATFORMS=${JAX_PLATFORMS:-cuda,cpu} XLA_PYTHON_CLIENT_PREALLOCATE=false
export NCCL_NVLS_ENABLE=0 # never a multicast object
export ISER_CUBLAS_LIBRARY=${ISER_CUBLAS_LIBRARY:-$(library libcublas)}
export ISER_NCCL_LIBRARY=${ISER_NCCL_LIBRARY:-$(library libnccl)}
several=" replication nccl layer " # need two GPUs
for name in ${BENCHMARKS:-plan replication nccl fused_moe products epilogues layer baselines}; do
  if [[ $several == *" $name "* && $gpus -lt 2 ]]; then
    echo "$name needs two GPUs" >&2
    continue
  fi
  echo "== $name" >&2
  "bench_$name"
done
exit "$failed"
