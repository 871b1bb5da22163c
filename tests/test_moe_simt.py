"""The CUDA fused MoE kernels' own code on a CPU, against an oracle; needs no GPU.

`tests/cuda/simt/grid` stands in for CUDA, PTX, TMA and wgmma; the program is the GPU's test
program. It ends with 9 where the host copies memory that nothing has written, as initcheck reports
it on a GPU. A fault put into a copy of the sources must be noticed.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest
import targets

ROOT = targets.ROOT
CXX = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")

pytestmark = pytest.mark.skipif(CXX is None, reason="no C++ compiler on PATH or in CXX")

(PROGRAM,) = targets.programs("moe_simt")
FLAGS = [*PROGRAM.copts, "-pthread"]
# The kernels, the test program, and what stands in for the other ops.
SOURCES = sorted(PROGRAM.sources, key=lambda path: (path.endswith(".cc"), path))
CASES = [
    "refusals",
    "first:",
    "plain: dtype 0",
    "sizes:",
    "tails:",
    "activations: bf16",
    "activations: fp8",
    "activations: plain",
    "rows:",
    "ranks:",
    "extra CTAs:",
    "devices: P=2",
    "waves:",
    "layers:",
    "wrap:",
    "fp8:",
]

# A name, a case that meets it, the file, what is right, what is wrong.
FAULTS = {
    "arrivals that are ordered by value": (
        "wrap:",
        "protocol.cuh",
        "if (has_reached(load_acquire(word), complete)) return aborted == 0;",
        "if (load_acquire(word) >= complete) return aborted == 0;",
    ),
    "operands freed before they are multiplied": (
        "first: tensor, 256",
        "moe_tensor_multiply.cuh",
        "wgmma_wait<1>();",
        "wgmma_wait<2>();",
    ),
    "columns behind the last that count as done": (
        "first: tensor in pairs, 64",
        "moe_context.cuh",
        "  if (tile.column >= context.call.sizes.column_tiles(tile.gemm)) return;\n",
        "",
    ),
    "tiles that do not wait for their rows": (
        "first: tensor",
        "moe_context.cuh",
        "bool ok = is_inner ? wait_count(context, counters.rows_done + tile.block, tile.num_rows)",
        "bool ok = is_inner ? true",
    ),
    "helper tiles that do not wait for READY": (
        "ranks: V=2",
        "moe_context.cuh",
        "if (ok && !is_ready && context.call.is_helper(tile.slot)) {",
        "if (false) {",
    ),
    "extra CTAs that wait for READY": (
        "extra CTAs:",
        "moe_context.cuh",
        "if (context.is_extra() && !has_come(context.table, Stage::kReady)) {",
        "if (false) {",
    ),
    "extra CTAs that pull rows of later waves": (
        "extra CTAs:",
        "moe_context.cuh",
        "may_pull() const { return !is_extra() || has_one_wave(); }",
        "may_pull() const { return true; }",
    ),
    "extra CTAs that do nothing": (
        "extra CTAs:",
        "moe_context.cuh",
        "return !is_extra() || call.launch.options.num_sms == 0 || ",
        "return !is_extra() || ",
    ),
    "a budget that leaves the copy nothing": (
        "extra CTAs:",
        "fused_moe.cu",
        "const int32_t budget = at_most(wanted, waiting);",
        "const int32_t budget = wanted;",
    ),
    "extra CTAs outside a budget": (
        "extra CTAs:",
        "moe_context.cuh",
        "call.launch.options.num_sms == 0 ||",
        "true ||",
    ),
    "the wrong next columns of K": (
        "first: tensor",
        "moe_mma.cuh",
        "kDescriptorStep = kMmaDepth * 2 >> 4",
        "kDescriptorStep = kMmaDepth * 4 >> 4",
    ),
    "columns of K behind the last whole step dropped": (
        "tails: D=72",
        "moe_tensor_shared.cuh",
        "return ceil_div(depth, Shape::kStepColumns);",
        "return at_least(depth / Shape::kStepColumns, 1);",
    ),
    "h stored behind its last column": (
        "tails: D=72",
        "moe_tensor_multiply.cuh",
        "if (row < valid && column + word * 8 < call.sizes.intermediate) {",
        "if (row < valid) {",
    ),
    "y stored behind its last column": (
        "tails: D=72",
        "moe_tensor_consume.cuh",
        "if (to != nullptr && word * 8 < columns) {",
        "if (to != nullptr) {",
    ),
    "all planes of a bank where its first is": (
        "ranks: V=2",
        "moe_begin.cuh",
        "banks + context.call.block.bundle.planes[which].offset",
        "banks",
    ),
    "planes of a replica's bundle as if all were as large": (
        "activations: bf16, silu",
        "moe_context.cuh",
        "call.block.bundle.bytes + layout.offset;",
        "call.block.bundle.bytes + which * layout.bytes;",
    ),
    "replicas without their biases": (
        "activations: bf16, silu",
        "moe_tensor_load.cuh",
        "call.launch.shape.has_biases;",
        "call.launch.shape.has_biases && !is_helper;",
    ),
    "up with gate's biases": (
        "activations: bf16, silu",
        "moe_tensor_load.cuh",
        "load_bias(tile, kUpBiasPlane,",
        "load_bias(tile, kGateBiasPlane,",
    ),
    "sums that do not begin as the biases": (
        "activations: bf16, silu",
        "moe_tensor_multiply.cuh",
        "Tiles::kIsAny || k > 0 ? 1 : step",
        "k > 0 ? 1 : step",
    ),
    "biases read before they are there": (
        "activations: bf16, silu",
        "moe_tensor_consume.cuh",
        "    mbarrier_wait(&shared_.full[steps_.at], steps_.parity);\n",
        "",
    ),
    "the second half of the columns with the first's biases": (
        "activations: bf16, silu",
        "moe_tensor_multiply.cuh",
        "(biases + kMmaColumns / 2, acc)",
        "(biases, acc)",
    ),
    "a tile's second block without its biases": (
        "activations: bf16, full",
        "moe_tensor_consume.cuh",
        "for (int i = 0; i < kBlocks; ++i) {\n        acc[i]",
        "for (int i = 0; i < 1; ++i) {\n        acc[i]",
    ),
    "FP8: up begins as gate's biases": (
        "activations: fp8, silu",
        "moe_fp8_multiply.cuh",
        "biases + (is_inner ? Fp8Tiles::kInner : kHalf)",
        "biases + (is_inner ? 0 : kHalf)",
    ),
    "FP8: down's second half begins as if it were up's": (
        "activations: fp8, silu",
        "moe_fp8_multiply.cuh",
        "biases + (is_inner ? Fp8Tiles::kInner : kHalf)",
        "biases + Fp8Tiles::kInner",
    ),
    "up clamped from above alone": (
        "activations: bf16, clamped",
        "moe_activation.cuh",
        "max_or_nan(min_or_nan(up, limit), -limit)",
        "min_or_nan(up, limit)",
    ),
    "a wave that overwrites the one before": (
        "waves: 1",
        "moe_pull.cuh",
        "  if (wave == 0) return true;",
        "  return true;",
    ),
    "FP8: up scaled as gate": (
        "fp8: first, 1 rows",
        "moe_fp8_multiply.cuh",
        "{low * first, high * first, low * second, high * second}",
        "{low * first, high * first, low * first, high * first}",
    ),
    "FP8: scales of a plane whose last blocks are halves": (
        "fp8: tails, D=192",
        "moe_fp8_multiply.cuh",
        "static_cast<size_t>(block) * fp8::num_blocks(depth)",
        "static_cast<size_t>(block) * (depth / fp8::kBlock)",
    ),
    "FP8: zeros behind a token's values not there": (
        "fp8: tails, D=192",
        "fused_moe.cu",
        "rows_of(maps->rows, workspace.rows(), hidden,",
        "rows_of(maps->rows, workspace.rows(), align_up(hidden, 128),",
    ),
    "FP8: h scaled by columns that are not there": (
        "activations: fp8, full",
        "moe_fp8_multiply.cuh",
        "if (inner_column(tile) >= context_.call.sizes.intermediate) return most;",
        "",
    ),
    "FP8: rows' scales not where their box begins": (
        "fp8: ranks",
        "moe_fp8_multiply.cuh",
        "held_row(context_.local_idx, tile.row) % 4",
        "held_row(context_.local_idx, tile.row) % 1",
    ),
    "FP8: a box of scales that begins at any row": (
        "fp8: ranks",
        "moe_tensor_load.cuh",
        "scales, row & ~3, step",
        "scales, row, step",
    ),
    "FP8: h scaled before all of its row is there": (
        "fp8: first, 100 rows",
        "moe_fp8_multiply.cuh",
        "    sync_multipliers();\n",
        "",
    ),
    "FP8: h scaled by half of its row": (
        "fp8: first, 1 rows",
        "moe_fp8_multiply.cuh",
        "fmaxf(amax[0][at], amax[1][at])",
        "amax[group_][at]",
    ),
    "FP8: a second row pulled without its scales": (
        "fp8: first, 64 rows",
        "moe_pull.cuh",
        "if (kIsFp8) copy_scales(workspace, held + 1,",
        "if (false) copy_scales(workspace, held + 1,",
    ),
    "FP8: products read before they are there": (
        "fp8: first, 1 rows",
        "moe_fp8_multiply.cuh",
        "wgmma_wait<0>();",
        "wgmma_wait<1>();",
    ),
}


# Routes without an expert, which the oracle has to write as well before the host copies all.
ORACLE_FAULT = (
    "plain: dtype 0",
    "moe_problem.cuh",
    "    return round_to(0, a.o + index);\n",
    "    return;\n",
)


def compile_objects(
    root: pathlib.Path, out: pathlib.Path, sources: list[str]
) -> list[pathlib.Path]:
    translated = out / "translated"
    names = [
        str(path.relative_to(root))
        for folder in ("ffi/cuda", "tests/cuda")
        for path in (root / folder).rglob("*.cu*")
    ]
    translate = [sys.executable, root / "tests/cuda/simt/translate.py", translated, *names]
    subprocess.run(translate, cwd=root, check=True, timeout=60)
    objects = []
    for source in sources:
        path = translated / source if source.endswith(".cu") else root / source
        objects.append(out / f"{path.stem}.o")
        build = [CXX, f"-I{translated}", *FLAGS, "-x", "c++", "-c", path, "-o", objects[-1]]
        built = subprocess.run(build, cwd=root, capture_output=True, text=True, timeout=300)
        assert built.returncode == 0, built.stderr
    return objects


def link(objects: list[pathlib.Path], program: pathlib.Path) -> pathlib.Path:
    subprocess.run([CXX, "-pthread", *objects, "-o", program], check=True, timeout=120)
    return program


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    out = tmp_path_factory.mktemp("moe")
    return compile_objects(ROOT, out, SOURCES)


def run(program: pathlib.Path, case: str) -> subprocess.CompletedProcess:
    command = [program, "--small", "--only", case]
    # Elsewhere there are SMs for all CTAs.
    env = os.environ | ({"ISER_SIMT_SMS": "8"} if case.startswith("extra") else {})
    return subprocess.run(command, capture_output=True, text=True, timeout=280, env=env)


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_oracle(case, objects, tmp_path):
    result = run(link(objects, tmp_path / "moe"), case)
    assert result.returncode == 0, result.stdout + result.stderr
    assert ", 0 failed" in result.stdout
    assert "\n0 passed" not in result.stdout


def plant(root: pathlib.Path, file: str, right: str, wrong: str) -> None:
    """A copy of the sources in `root`, one of them with a fault."""
    for folder in ("ffi/core", "ffi/cuda", "tests/cuda"):
        shutil.copytree(ROOT / folder, root / folder)
    for header in (ROOT / "tests").glob("*.h"):
        shutil.copy(header, root / "tests")
    folder, _, name = file.rpartition("/")
    (path,) = (root / folder).rglob(name)
    text = path.read_text()
    assert right in text
    path.write_text(text.replace(right, wrong))


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(fault, objects, tmp_path):
    case, name, right, wrong = FAULTS[fault]
    plant(tmp_path, f"ffi/cuda/{name}", right, wrong)
    changed = compile_objects(tmp_path, tmp_path, SOURCES[:1])
    result = run(link([*changed, *objects[1:]], tmp_path / "moe"), case)
    assert result.returncode != 0, result.stdout


def test_host_copies_of_unwritten_memory_are_noticed(objects, tmp_path):
    case, name, right, wrong = ORACLE_FAULT
    plant(tmp_path, f"tests/cuda/{name}", right, wrong)
    changed = compile_objects(tmp_path, tmp_path, SOURCES[1:2])
    result = run(link([objects[0], *changed, objects[2]], tmp_path / "moe"), case)
    assert result.returncode == 9, result.stdout + result.stderr
    assert "words that nothing has written" in result.stderr
