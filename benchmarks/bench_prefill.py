"""README's table: `jax-iser prefill`, and where and when it ran.

    python benchmarks/bench_prefill.py --json benchmarks/results/prefill.json \\
        --plot docs/figures/prefill.png

The busy time of the slowest rank is CPU time, which other work on the machine raises for both arms.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import _report

from jax_iser.cli import _prefill_views
from jax_iser.cli import main as command


def run(options: list[str]) -> dict:
    """What one call of the command gives, without its layers' details."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefill.json"
        if code := command(["prefill", *options, "--json", str(path)]):
            raise SystemExit(code)
        return json.loads(path.read_text())


def main() -> None:
    parser = _report.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--plot", metavar="FILE", help="README's figure")
    args, options = parser.parse_known_args()
    result = run(options)
    if args.plot:
        _prefill_views.plot(result, args.plot)
    _report.write(args, {"prefill": result})


if __name__ == "__main__":
    main()
