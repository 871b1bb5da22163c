"""The CUDA plan's own code on a CPU, a fiber for each thread, against the C++ core; needs no GPU.

`tests/cuda/simt` stands in for CUDA. A warp runs as far as it can alone, so that code that lacks a
barrier is found out. A fault put into a copy of the sources must be noticed.
"""

import os
import pathlib
import shutil
import subprocess

import pytest
import targets

ROOT = targets.ROOT
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH or in CXX")

FAULTS = {
    "a tie that goes to the higher rank": (
        "plan_place.cuh",
        "other == room[k] && j < 32 * k + lane",
        "other == room[k] && j > 32 * k + lane",
    ),
    "one pass of quota repair": (
        "plan_repair.cuh",
        "step < 2 * levels &&",
        "step < levels &&",
    ),
    "one pass of quota repair on a warp": (
        "plan_waves.cuh",
        "if (left == 0) break;",
        "break;",
    ),
    "a pair whose second rank comes first": (
        "plan_waves.cuh",
        "index < rings / 2",
        "index >= rings / 2",
    ),
    "a placement that ends where its masks do": (
        "plan_warp.cuh",
        "if (count == kWarpRows) return;",
        "if (count == kWarpRows) break;",
    ),
    "the other half of the masks": (
        "plan_arrays.cuh",
        "32 + lowest(static_cast<uint32_t>(bits >> 32))",
        "lowest(static_cast<uint32_t>(bits >> 32))",
    ),
    "a missing barrier": (
        "plan_derive.cuh",
        "    index_hosts(config, arrays);\n    __syncthreads();\n",
        "    index_hosts(config, arrays);\n",
    ),
}


def run(root: pathlib.Path, out: pathlib.Path, cases: int) -> subprocess.CompletedProcess:
    (program,) = targets.programs("plan_simt")
    build = [CXX, *program.copts, *program.sources, "-o", str(out)]
    built = subprocess.run(build, cwd=root, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stderr
    return subprocess.run([out, str(cases)], capture_output=True, text=True, timeout=300)


def test_plan_equals_the_core(tmp_path):
    result = run(ROOT, tmp_path / "plan", 9)
    assert result.returncode == 0, result.stdout
    assert "15 passed, 0 failed" in result.stdout


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, tmp_path):
    name, right, wrong = FAULTS[fault]
    for folder in ("ffi/core", "ffi/cuda", "tests/cuda"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (source,) = (tmp_path / "ffi/cuda").rglob(name)
    text = source.read_text()
    assert right in text
    source.write_text(text.replace(right, wrong))
    result = run(tmp_path, tmp_path / "plan", 9)
    assert result.returncode == 1, result.stdout
