"""The CUDA toolkit of this machine as a Bazel repository, where there is one. Nothing is downloaded.

nvcc is the one that CUDACXX names, else the one on PATH. Without it the targets of CUDA stay out of
`...`, and say why when they are asked for.
"""

_BUILD = """
load("@rules_cc//cc:defs.bzl", "cc_library")

package(default_visibility = ["//visibility:public"])

cc_library(
    name = "runtime",
    srcs = glob(["libcudart_static.a"], allow_empty = True),
    hdrs = glob(["include/**"], allow_empty = True),
    includes = ["include"],
    linkopts = ["-ldl", "-lrt", "-pthread"],
)

constraint_setting(name = "toolkit")

constraint_value(
    name = "nvcc_on_PATH_or_in_CUDACXX",
    constraint_setting = ":toolkit",
)
"""

def _toolkit(ctx, nvcc):
    """The folder with include/ and lib64/, as nvcc itself sees it."""
    answer = ctx.execute([nvcc, "--dryrun", "-E", "-x", "cu", "/dev/null"])
    for line in answer.stderr.split("\n"):
        if line.startswith("#$ TOP="):
            return ctx.path(line[len("#$ TOP="):])
    fail("%s --dryrun names no TOP:\n%s" % (nvcc, answer.stderr))

def _local_cuda_impl(ctx):
    nvcc = ctx.os.environ.get("CUDACXX") or ctx.which("nvcc")
    if nvcc:
        top = _toolkit(ctx, nvcc)
        ctx.symlink(top.get_child("include"), "include")
        ctx.symlink(top.get_child("lib64").get_child("libcudart_static.a"), "libcudart_static.a")
    ctx.file("nvcc.bzl", "NVCC = \"%s\"\n" % (nvcc or ""))
    ctx.file("BUILD", _BUILD)

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    doc = "nvcc, and the headers and library of its runtime.",
    environ = ["CUDACXX", "PATH"],
    local = True,
)
