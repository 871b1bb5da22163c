#!/usr/bin/env bash
# Bazel with all of its files in build/bazel, so that `make clean` leaves nothing behind:
#
#   scripts/bazel.sh                           (make bazel) libraries, extensions, C++ tests
#   scripts/bazel.sh test //:tests/test_layer  any command of Bazel's
#
# Needs Bazel (Debian: apt install bazel-bootstrap) and .venv (`make setup`).
set -euo pipefail
cd "$(dirname "$0")/.."
if ! command -v bazel > /dev/null; then
  echo "bazel is not on PATH (Debian: apt install bazel-bootstrap)" >&2
  exit 1
fi
bazel=(bazel "--output_user_root=$PWD/build/bazel/root" --max_idle_secs=60)
if [ $# -gt 0 ]; then
  exec "${bazel[@]}" "$@"
fi
trap '"${bazel[@]}" shutdown' EXIT
# Of the suite, test_planner alone shows that the extension loads; `make test` runs the others.
"${bazel[@]}" test --noshow_progress --build_tag_filters=-suite --test_tag_filters=-suite //...
