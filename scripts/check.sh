#!/usr/bin/env bash
# Formatting, lint and types, for people, pre-commit and CI alike: scripts/check.sh [--fix] [STEP...]
# Steps: ruff mypy clang-format buildifier shell; all of them by default. --fix formats in place.
# Tools come from .venv (`make setup`), in the versions that pyproject.toml names.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
fix=false
if [ "${1:-}" = --fix ]; then
  fix=true
  shift
fi
[ $# -gt 0 ] || set -- ruff clang-format buildifier shell mypy

sources() { # tracked and new files of the given patterns, without deleted ones
  git ls-files --cached --others --exclude-standard -- "$@" | while read -r file; do
    [ ! -f "$file" ] || echo "$file"
  done
}

check_ruff() {
  if $fix; then
    "$bin/ruff" format -q . && "$bin/ruff" check -q --fix .
  else
    "$bin/ruff" format --check -q . && "$bin/ruff" check -q .
  fi
}

check_clang-format() {
  local mode=(--dry-run -Werror)
  ! $fix || mode=(-i)
  sources '*.cc' '*.h' '*.cu' '*.cuh' | xargs -r "$bin/clang-format" "${mode[@]}"
}

check_buildifier() {
  if ! command -v buildifier > /dev/null; then
    echo "buildifier is not on PATH: BUILD files were not checked"
    return 0
  fi
  local mode=check
  ! $fix || mode=fix
  sources BUILD '*/BUILD' '*.bazel' '*.bzl' | xargs -r buildifier -mode="$mode" -lint=warn
}

check_shell() {
  sources '*.sh' .ci/run | xargs -r -n 1 bash -n
}

check_mypy() {
  # As in an installed package: with the stub that the last build made, and models/ as jax_iser.models.
  ln -sfn ../models jax_iser/models
  [ ! -f build/venv/_iser.pyi ] || cp -u build/venv/_iser.pyi jax_iser/
  "$bin/mypy"
}

failed=()
for step in "$@"; do
  echo "== $step"
  "check_$step" || failed+=("$step")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]} (scripts/check.sh --fix formats; the rest is by hand)" >&2
  exit 1
fi
