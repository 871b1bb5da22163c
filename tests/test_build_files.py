"""The build files name the same sources, and the sources that exist."""

import ast
import pathlib
import re
import runpy
import shutil
import subprocess
import tomllib
from collections import Counter

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent


def on_disk(folder: str, pattern: str) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob(pattern)}


def cmake_list(name: str) -> set[str]:
    """The items of `set(name ...)` in CMakeLists.txt."""
    text = (ROOT / "CMakeLists.txt").read_text()
    (items,) = re.findall(rf"^ *set\({name}\s([^)]*)\)", text, re.MULTILINE)
    assert max(Counter(items.split()).values()) == 1, f"{name} names a file twice"
    return set(items.split())


def cmake_isa_flags() -> dict[str, list[str]]:
    """Source -> flags of its own in CMakeLists.txt."""
    text = (ROOT / "CMakeLists.txt").read_text()
    pattern = r'set_source_files_properties\((\S+) PROPERTIES\s+COMPILE_OPTIONS "([^"]*)"\)'
    return {source: flags.split(";") for source, flags in re.findall(pattern, text)}


class Strings(ast.NodeVisitor):
    """Strings of a BUILD target, those under `select` apart."""

    def __init__(self) -> None:
        self.plain: list[str] = []
        self.selected: list[str] = []

    def visit_Call(self, node: ast.Call) -> None:
        inner = Strings()
        inner.generic_visit(node)
        target = self.selected if getattr(node.func, "id", "") == "select" else self.plain
        target += inner.plain
        self.selected += inner.selected

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.plain.append(node.value)


def bazel_targets() -> dict[str, Strings]:
    """Target name -> its strings. BUILD files are Python's grammar."""
    targets = {}
    for node in ast.parse((ROOT / "BUILD").read_text()).body:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            names = [k.value for k in node.value.keywords if k.arg == "name"]
            if names and isinstance(names[0], ast.Constant):
                strings = Strings()
                strings.generic_visit(node.value)
                targets[str(names[0].value)] = strings
    return targets


def bazel_sources(pattern: str) -> set[str]:
    found = [s for t in bazel_targets().values() for s in t.plain if re.fullmatch(pattern, s)]
    assert max(Counter(found).values(), default=1) == 1, "BUILD names a file twice"
    return set(found)


def test_cmake_names_every_cpu_and_binding_source():
    assert cmake_list("ISER_CPU_SOURCES") == on_disk("ffi/cpu", "*.cc")
    bindings = on_disk("ffi/bindings", "*.cc")
    of_cuda = {path for path in bindings if pathlib.Path(path).name.startswith("cuda_")}
    assert cmake_list("ISER_BINDING_SOURCES") == bindings - of_cuda
    assert cmake_list("ISER_CUDA_BINDING_SOURCES") == of_cuda


def test_cuda_sources_are_looked_for_where_they_are():
    """The CUDA list may be empty; a source outside ffi/cuda/ would be built by nothing."""
    everywhere = on_disk("ffi", "*.cu")
    assert everywhere == {path for path in everywhere if path.startswith("ffi/cuda/")}


def test_bazel_names_the_sources_that_cmake_names():
    cmake = cmake_list("ISER_CPU_SOURCES") | cmake_list("ISER_BINDING_SOURCES")
    assert bazel_sources(r"ffi/(cpu|bindings)/.*\.cc") == cmake


def test_bazel_names_every_header():
    headers = (
        on_disk("ffi/core", "*.h") | on_disk("ffi/cpu", "*.h") | on_disk("ffi/bindings", "*.h")
    )
    assert bazel_sources(r"ffi/(core|cpu|bindings)/.*\.h") == headers


def test_every_build_gives_a_source_the_same_instruction_set():
    cmake = cmake_isa_flags()
    assert set(cmake) == {"ffi/cpu/gemm_avx2.cc", "ffi/cpu/gemm_avx512.cc"}
    targets = bazel_targets()
    sanitized = runpy.run_path(str(ROOT / "scripts" / "sanitize.py"))["ISA_FLAGS"]
    for source, flags in cmake.items():
        name = pathlib.Path(source).stem
        assert [flag for flag in targets[name].selected if flag.startswith("-m")] == flags
        assert sanitized[f"{name}.cc"] == flags


def test_no_build_lets_the_compiler_fuse_products_and_sums():
    for name in ("CMakeLists.txt", "BUILD", "scripts/sanitize.py"):
        text = (ROOT / name).read_text()
        assert "-ffp-contract=off" in text, name
        for flag in ("-ffast-math", "-funsafe-math", "-march="):
            assert flag not in text, f"{name}: {flag}"


def test_core_headers_stand_alone():
    """ffi/core is tested by plain programs: it includes itself and the standard library only."""
    for path in sorted((ROOT / "ffi" / "core").glob("*.h")):
        for include in re.findall(r'#include ["<]([^">]+)[">]', path.read_text()):
            assert include.startswith("ffi/core/") or "/" not in include, f"{path.name}: {include}"


def test_core_headers_compile_one_by_one(tmp_path):
    compiler = shutil.which("c++") or pytest.skip("no C++ compiler on PATH")
    for path in sorted((ROOT / "ffi" / "core").glob("*.h")):
        source = tmp_path / "one.cc"
        source.write_text(f'#include "ffi/core/{path.name}"\n')
        command = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
        done = subprocess.run(
            [*command, f"-I{ROOT}", str(source)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, f"{path.name}:\n{done.stderr}"


def test_every_environment_variable_of_ours_is_documented():
    used = set()
    for folder in ("ffi", "jax_iser", "models", "scripts", "bazel", "tests/gpu"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".cc", ".h", ".cu", ".py", ".bzl"}:
                used |= set(re.findall(r"[\"'](ISER_[A-Z_]+)[\"']", path.read_text()))
            elif path.suffix == ".sh":
                used |= set(re.findall(r"\$\{?(ISER_[A-Z_]+)", path.read_text()))
    documented = re.findall(r"^\| `(ISER_\w+)`", environment_table(), re.MULTILINE)
    options = {"ISER_INPLACE", "ISER_WERROR", "ISER_XLA_FFI_INCLUDE"}  # CMake's, in building.md
    assert sorted(used - options) == sorted(documented)


def environment_table() -> str:
    return (ROOT / "docs" / "environment.md").read_text()


def test_versions_agree():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    module = re.search(r'version = "([^"]+)"', (ROOT / "MODULE.bazel").read_text())
    assert module is not None
    assert module.group(1) == project["project"]["version"]


def test_the_built_package_has_the_version_of_the_sources():
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("jax-iser")
    except PackageNotFoundError:
        pytest.skip("jax_iser runs from the checkout and is not installed")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert installed == project["project"]["version"]


def test_bazel_builds_the_core(tmp_path):
    bazel = shutil.which("bazel") or pytest.skip("bazel is not installed")
    output = ["--output_user_root", str(tmp_path), "--max_idle_secs=5"]
    build = ["build", "--noshow_progress", "--symlink_prefix=/", "//:core", "//:gemm"]
    done = subprocess.run(
        [bazel, *output, *build], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    unreachable = ("Unknown host", "Connection refused", "Network is unreachable", "timed out")
    if done.returncode and any(words in done.stderr for words in unreachable):
        pytest.skip(f"bazel could not fetch its own rules: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
