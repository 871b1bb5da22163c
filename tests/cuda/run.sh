#!/usr/bin/env bash
# Builds the CUDA tests and benchmarks with nvcc and runs them on a GPU of compute capability 9.0.
#
#   tests/cuda/run.sh [build|test|bench|sanitize]...   (default: build test)
#   tests/cuda/run.sh simt                             the plan's code on the CPU; needs neither
#
# ISER_CUDA_BUILD: where binaries go (default build/cuda). GPUS: how many GPUs to use (default 1).
# OUT: where benchmarks leave <name>.jsonl and sanitizers what they print (default: the build folder).
# SANITIZER: the compute-sanitizer to use (default: the one on PATH).
set -euo pipefail
cd "$(dirname "$0")/../.."
build=${ISER_CUDA_BUILD:-build/cuda}
out=${OUT:-$build}
gpus=${GPUS:-1}
python=${PYTHON:-python3}
mkdir -p "$build" "$out"

compile() {  # one program of one source and every op; objects of the ops are shared
  nvcc -std=c++17 -O3 -lineinfo -gencode=arch=compute_90a,code=sm_90a -I. "$@"
}

build_all() {
  local source object name pids=() objects=() libraries programs
  libraries=$("$python" scripts/targets.py library cuda)
  programs=$("$python" scripts/targets.py programs cuda_tests cuda_benchmarks)
  for source in $libraries; do
    object="$build/${source//\//.}.o"
    objects+=("$object")
    [[ "$object" -nt "$source" && -z "$(find ffi -name '*.*h' -newer "$object")" ]] && continue
    compile -c "$source" -o "$object" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
  pids=()
  for source in $programs; do
    name=$(basename "$source" .cu)
    compile "$source" "${objects[@]}" -o "$build/$name" -ldl & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid"; done
}

run_tests() {
  local failed=0 program
  for program in "$build"/test_{plan,replication,fused_moe}; do
    timeout "${LIMIT:-240}" "$program" --gpus "$gpus" || { echo "$program failed: $?"; failed=1; }
  done
  return $failed
}

run_simt() {
  "$python" scripts/sanitize.py --only address test_plan_simt
}

run_benchmarks() {
  local program
  for program in "$build"/bench_*; do
    timeout "${LIMIT:-240}" "$program" --gpus "$gpus" | tee "$out/$(basename "$program").jsonl"
  done
}

# One line: how long it took and whether it ended as wanted; what it printed is in a file.
check() {  # name, "clean" or "caught", command
  local name=$1 wanted=$2 began=$SECONDS rc=0 found=clean
  shift 2
  timeout -k 5 "${LIMIT:-90}" "$@" >"$out/$name.txt" 2>&1 || rc=$?
  if [[ $rc == 9 ]]; then found=caught; elif [[ $rc != 0 ]]; then found="ended with $rc"; fi
  if [[ $found == "$wanted" ]]; then
    echo "ok   $name: $found, $((SECONDS - began)) s"
  else
    echo "FAIL $name: $found, wanted $wanted, $((SECONDS - began)) s; see $out/$name.txt"
    return 1
  fi
}

# Each tool must be silent on the kernels, and must speak on a planted fault. racecheck is slow:
# of the fused layer it gets the first cases, which have every role of both engines in few tiles.
sanitize() {
  local failed=0 tool program
  local sanitizer=${SANITIZER:-compute-sanitizer} plant="$build/test_replication --plant"
  local -a options
  "$sanitizer" --version | tail -n 1
  for tool in memcheck racecheck initcheck synccheck; do
    options=(--tool "$tool" --error-exitcode 9)
    check "planted_$tool" caught "$sanitizer" "${options[@]}" $plant "$tool" || failed=1
    if [[ $tool == racecheck ]]; then
      check "planted_ring" caught "$sanitizer" "${options[@]}" $plant ring || failed=1
      check "ring_of_no_fault" clean "$sanitizer" "${options[@]}" $plant "no fault" || failed=1
    fi
    for program in plan replication fused_moe; do
      local -a subset=(--small)
      [[ $tool == racecheck && $program == fused_moe ]] && subset+=(--only "first: ")
      check "$tool.$program" clean "$sanitizer" "${options[@]}" "$build/test_$program" \
        "${subset[@]}" || failed=1
    done
  done
  return $failed
}

for step in "${@:-build test}"; do
  for word in $step; do
    case $word in
      build) build_all ;;
      test) run_tests ;;
      bench) run_benchmarks ;;
      sanitize) sanitize ;;
      simt) run_simt ;;
      *) echo "unknown step $word" >&2; exit 2 ;;
    esac
  done
done
