#!/usr/bin/env bash
# Runs the suite in one environment, two tests at a time: scripts/test.sh VENV [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
shift

"$venv/bin/python" -I -c 'import platform, jax
print(f"== Python {platform.python_version()}, jax {jax.__version__}", flush=True)'
exec "$venv/bin/pytest" -n 2 --dist worksteal "$@"
