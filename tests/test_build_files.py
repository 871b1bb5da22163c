"""Every build has the targets of targets.bzl, and the list has every file that is there."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
from collections import Counter

import pytest
import targets
from targets import LIBRARIES, PROGRAMS

ROOT = targets.ROOT


HOST_GROUPS = [name for name, values in targets.PROGRAMS.items() if "cuda" not in values["deps"]]


def on_disk(folder: str, *suffixes: str) -> set[str]:
    paths = (ROOT / folder).rglob("*")
    return {str(path.relative_to(ROOT)) for path in paths if path.suffix in suffixes}


def includes(path: str) -> set[str]:
    """The files of ours that a source includes, as paths below the root."""
    found = set()
    for name in re.findall(r'^#include "([^"]+)"', (ROOT / path).read_text(), re.MULTILINE):
        beside = pathlib.Path(path).parent / name
        found.add(str(beside) if (ROOT / beside).exists() else name)
    return {name for name in found if (ROOT / name).exists()}


def headers_of(deps: list[str]) -> set[str]:
    return {path for name in targets.closure(deps) for path in targets.library_files(name, "hdrs")}


def test_every_source_belongs_to_one_library():
    sources = Counter(path for name in LIBRARIES for path in targets.library_files(name, "srcs"))
    assert set(sources) == on_disk("ffi", ".cc", ".cu")
    assert max(sources.values()) == 1, sources.most_common(3)


def test_every_header_belongs_to_a_library():
    assert headers_of(list(LIBRARIES)) == on_disk("ffi", ".h", ".cuh")


def test_every_program_belongs_to_a_group():
    found = Counter(path for group in PROGRAMS for path in targets.files(PROGRAMS[group]["srcs"]))
    programs = on_disk("tests", ".cc", ".cu") | on_disk("benchmarks/cuda", ".cc", ".cu")
    shared = {path for group in PROGRAMS for path in targets.files(PROGRAMS[group].get("with", []))}
    planted = on_disk("tests/cpp/planted", ".cc")
    assert set(found) == programs - shared - planted
    # What is translated for the simulator is the GPU's own program.
    simulated = {
        path
        for values in PROGRAMS.values()
        if values.get("translate")
        for path in targets.files(values["srcs"])
    }
    assert {path for path, count in found.items() if count > 1} == simulated


@pytest.mark.parametrize("name", LIBRARIES)
def test_libraries_include_what_they_declare(name):
    """Bazel's sandbox has nothing else; here a missing dependency is found without it."""
    known = headers_of([name])
    files = targets.library_files(name, "srcs") + targets.library_files(name, "hdrs")
    for path in files:
        assert includes(path) <= known, f"{path} needs deps or hdrs in targets.bzl for {name}"


@pytest.mark.parametrize("group", PROGRAMS)
def test_programs_include_what_they_declare(group):
    values = PROGRAMS[group]
    hdrs = targets.files(values["hdrs"])
    own = [path for path in targets.files(values.get("with", [])) if path.startswith("tests/")]
    known = headers_of(values["deps"]) | set(hdrs)
    for path in [*targets.files(values["srcs"]), *own, *hdrs]:
        missing = {name for name in includes(path) if not name.endswith(".cu")} - known
        assert not missing, f"{path} needs deps or hdrs in targets.bzl for {group}: {missing}"


def test_bazel_has_every_target():
    text = (ROOT / "BUILD").read_text()
    for name in set(LIBRARIES) - {"bindings", "cuda_bindings"}:
        assert f'_library(name = "{name}"' in text or f'    name = "{name}",' in text, name
    for name in ("bindings", "cuda_bindings"):
        assert f'library_files("{name}", "srcs")' in text
    assert "for group, fields in PROGRAMS.items()" in text


@pytest.fixture(scope="module")
def compile_commands(tmp_path_factory) -> dict[str, str]:
    """Source -> command of a CMake build that has every program."""
    cmake = shutil.which("cmake", path=f"{pathlib.Path(sys.executable).parent}:{os.defpath}")
    if cmake is None:
        pytest.skip("cmake is neither beside Python nor on PATH")
    build = tmp_path_factory.mktemp("cmake")
    command = [cmake, "-S", ROOT, "-B", build, "-DISER_INPLACE=OFF"]
    command += [f"-DPython_EXECUTABLE={sys.executable}", "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    if xla := oldest_ffi_headers():
        command.append(f"-DISER_XLA_FFI_INCLUDE={xla}")
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    commands = json.loads((build / "compile_commands.json").read_text())
    found = {}
    for each in commands:
        path = each["file"].replace(f"{build}/translated/", "").replace(f"{ROOT}/", "")
        found[path] = each["command"]
    return found


def oldest_ffi_headers() -> str | None:
    """Those of .venv: the library is built against the oldest."""
    pattern = ".venv/lib/python3.*/site-packages/jaxlib/include"
    return next((str(path) for path in ROOT.glob(pattern)), None)


def test_cmake_compiles_every_source_and_program(compile_commands):
    wanted = set(targets.host_sources(["bindings"]))
    for group in HOST_GROUPS:
        wanted |= {path for program in targets.programs(group) for path in program.sources}
    ours = {path for path in compile_commands if path.startswith(("ffi/", "tests/"))}
    assert ours == wanted


def test_cmake_compiles_with_the_flags_of_the_list(compile_commands):
    for path in targets.host_sources(["bindings"]):
        words = compile_commands[path].split()
        extra = [word for word in words if word.startswith(("-mavx", "-mfma", "-mf16c"))]
        assert extra == targets.isa_copts(path), path
        assert set(targets.COPTS) <= set(words), path


def test_the_list_gives_instruction_sets_by_name():
    assert targets.isa_copts("ffi/cpu/gemm_avx2.cc", "x86_64") == ["-mavx2", "-mfma", "-mf16c"]
    assert "-mavx512f" in targets.isa_copts("ffi/cpu/gemm_avx512.cc", "x86_64")
    assert targets.isa_copts("ffi/cpu/gemm_avx2.cc", "aarch64") == []
    assert targets.isa_copts("ffi/cpu/gemm.cc", "x86_64") == []


def test_no_build_lets_the_compiler_fuse_products_and_sums():
    assert "-ffp-contract=off" in targets.COPTS
    for name in ("CMakeLists.txt", "bazel/cpp.bzl", "scripts/sanitize.py"):
        assert re.search(r"\bCOPTS|ISER_COPTS", (ROOT / name).read_text()), name
    for name in ("CMakeLists.txt", "BUILD", "targets.bzl", "bazel/cpp.bzl", "scripts/sanitize.py"):
        text = (ROOT / name).read_text()
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
