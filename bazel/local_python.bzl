"""A Python environment of this machine as a Bazel repository.

It takes the interpreter that ISER_PYTHON names, else .venv of the checkout, else python3 on PATH, and
offers its C headers, nanobind and the XLA FFI headers, and a runtime for tests: the environment that
CMake builds in, so that both builds see the same versions. Nothing is downloaded.
"""

# The library has to load in every runtime that is supported, so the headers are the oldest ones'.
_ASK = """
import jax, nanobind, pathlib, re, sysconfig
header = pathlib.Path(jax.ffi.include_dir(), "xla/ffi/api/c_api.h").read_text()
api = ".".join(re.findall("define XLA_FFI_API_M(?:AJ|IN)OR +([0-9]+)", header))
if api != "0.3":
    raise SystemExit("its XLA FFI headers have API " + api + ", but jax_iser is built against 0.3 (jax 0.10.1)")
print(sysconfig.get_path("include"))
print(nanobind.include_dir())
print(nanobind.source_dir())
print(jax.ffi.include_dir())
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")
load("@rules_python//python:defs.bzl", "py_runtime", "py_runtime_pair")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "xla_ffi",
    hdrs = glob(["xla/xla/ffi/api/*.h"]),
    includes = ["xla"],
)

cc_library(
    name = "python_headers",
    hdrs = glob(["python/**/*.h"]),
    includes = ["python"],
)

cc_library(
    name = "nanobind",
    srcs = ["nanobind_src/nb_combined.cpp"],
    hdrs = glob([
        "nanobind/**/*.h",
        "nanobind_src/*.h",
        "nanobind_src/*.cpp",
        "robin_map/**/*.h",
    ], exclude = ["nanobind_src/nb_combined.cpp"], allow_empty = True),
    copts = ["-std=c++17", "-O2", "-fno-strict-aliasing", "-fvisibility=hidden", "-w"],
    includes = ["nanobind", "nanobind_src", "robin_map"],
    deps = [":python_headers"],
)

py_runtime(
    name = "runtime",
    interpreter_path = "{python}",
    python_version = "PY3",
)

py_runtime_pair(
    name = "runtime_pair",
    py3_runtime = ":runtime",
)

toolchain(
    name = "toolchain",
    toolchain = ":runtime_pair",
    toolchain_type = "@bazel_tools//tools/python:toolchain_type",
)
"""

def _find_python(ctx):
    asked = ctx.os.environ.get("ISER_PYTHON")
    if asked:
        return asked
    venv = ctx.path(Label("//:BUILD")).dirname.get_child(".venv").get_child("bin").get_child("python")
    if venv.exists:
        return str(venv)
    found = ctx.which("python3")
    if not found:
        fail("no Python found: run `make setup`, or set ISER_PYTHON to one with jax and nanobind")
    return str(found)

def _local_python_impl(ctx):
    python = _find_python(ctx)
    answer = ctx.execute([python, "-c", _ASK])
    if answer.return_code:
        fail("cannot build with %s; run `make setup` or set ISER_PYTHON:\n%s" % (
            python,
            answer.stderr,
        ))
    include, nanobind, nanobind_src, xla = answer.stdout.strip().split("\n")
    ctx.symlink(include, "python")
    ctx.symlink(nanobind, "nanobind")
    ctx.symlink(nanobind_src, "nanobind_src")
    ctx.symlink(xla, "xla")
    robin_map = ctx.path(nanobind).dirname.get_child("ext").get_child("robin_map").get_child("include")
    ctx.symlink(robin_map, "robin_map")
    ctx.file("BUILD", _BUILD.format(python = python))

local_python = repository_rule(
    implementation = _local_python_impl,
    doc = "Headers, nanobind and the interpreter of a local Python environment.",
    environ = ["ISER_PYTHON", "PATH"],
    local = True,
)
