#!/usr/bin/env bash
# Runs the suite in one environment: scripts/test.sh VENV [pytest arguments]
# Tests run two at a time; those marked serial, which measure time, then run alone.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift

"$venv/bin/python" -I -c 'import platform, jax
print(f"== Python {platform.python_version()}, jax {jax.__version__}")'

# pytest answers 5 where no test was selected; that is fine for one of the two runs, not for both.
code=0
"$venv/bin/pytest" -n 2 --dist worksteal -m "not serial" "$@" || code=$?
[ "$code" = 0 ] || [ "$code" = 5 ] || exit "$code"

serial_code=0
"$venv/bin/pytest" -m serial "$@" || serial_code=$?
[ "$serial_code" = 5 ] && [ "$code" = 0 ] || exit "$serial_code"
