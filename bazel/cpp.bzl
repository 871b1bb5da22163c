"""The groups of //:targets.bzl as Bazel's targets."""

load("@local_cuda//:nvcc.bzl", "NVCC")
load("@rules_cc//cc:defs.bzl", "cc_library", "cc_test")
load("//:targets.bzl", "COPTS", "ISA_COPTS", "LIBRARIES", "PROGRAMS")

_OPTIMIZED = [
    "-O3",
    "-fvisibility=hidden",
] + COPTS

# For target_compatible_with: without nvcc `...` leaves such targets out, and one that is asked for
# names this as missing.
NEEDS_NVCC = [] if NVCC else ["@local_cuda//:nvcc_on_PATH_or_in_CUDACXX"]
_NVCC_COPTS = "-std=c++17 -O3 -gencode=arch=compute_90a,code=sm_90a -Xcompiler=-fPIC,-fvisibility=hidden -I."

def _files(patterns, exclude = []):
    return native.glob(patterns, exclude = exclude, allow_empty = True)

def library_files(name, kind):
    """The `srcs` or `hdrs` of one library of the list."""
    library = LIBRARIES[name]
    return _files(library.get(kind, []), library.get("exclude", []))

def library_copts():
    """Flags of every source that a library is compiled from."""
    return ["-std=c++17"] + _OPTIMIZED

def _isa_end(source):
    for end in ISA_COPTS:
        if source.endswith(end):
            return end
    return None

def cpp_library(name, **attrs):
    """A library of the list; sources with an instruction set of their own are libraries apart.

    Args:
      name: its name in LIBRARIES, and the target's.
      **attrs: for cc_library.
    """
    deps = [":" + dep for dep in LIBRARIES[name].get("deps", [])]
    srcs = library_files(name, "srcs")
    special = [source for source in srcs if _isa_end(source)]
    special_targets = []
    for source in special:
        target = source.split("/")[-1][:-len(".cc")]
        cc_library(
            name = target,
            srcs = [source],
            copts = library_copts() + select({
                "@platforms//cpu:x86_64": ISA_COPTS[_isa_end(source)],
                "//conditions:default": [],
            }),
            deps = deps,
        )
        special_targets.append(":" + target)
    cc_library(
        name = name,
        srcs = [source for source in srcs if source not in special],
        hdrs = library_files(name, "hdrs"),
        copts = library_copts(),
        deps = deps + special_targets,
        **attrs
    )

def _nvcc(name, srcs, outs, command, **attrs):
    native.genrule(
        name = name,
        srcs = srcs,
        outs = outs,
        cmd = command.format(nvcc = "%s %s" % (NVCC, _NVCC_COPTS)),
        target_compatible_with = NEEDS_NVCC,
        **attrs
    )

def cuda_library(name):
    """A library of the list whose .cu files nvcc compiles, one action per file.

    Args:
      name: its name in LIBRARIES, and the target's.
    """
    headers = library_files("core", "hdrs") + library_files("cuda_headers", "hdrs")
    srcs = library_files(name, "srcs")
    objects = []
    for source in srcs:
        if source.endswith(".cu"):
            objects.append("nvcc/%s.o" % source)
            _nvcc(
                name = objects[-1] + "_by_nvcc",
                srcs = [source] + headers,
                outs = [objects[-1]],
                command = "{nvcc} -c $(location %s) -o $@" % source,
            )
    native.genrule(
        name = name + "_archive",
        srcs = objects,
        outs = ["nvcc/lib%s_kernels.a" % name],
        cmd = "ar rcs $@ $(SRCS)",
        target_compatible_with = NEEDS_NVCC,
    )
    cc_library(
        name = name,
        srcs = [source for source in srcs if not source.endswith(".cu")] +
               ["nvcc/lib%s_kernels.a" % name],
        copts = library_copts(),
        target_compatible_with = NEEDS_NVCC,
        deps = [":cuda_headers", "@local_cuda//:runtime"],
    )

def _translated(group, sources):
    """CUDA sources as C++ below translated/; returns the folder.

    Args:
      group: the name of the genrule's group.
      sources: what is translated, headers and all.

    Returns:
      The folder in which the translations have their old paths.
    """
    folder = "translated_" + group
    tool = PROGRAMS[group]["translate"][0]
    native.genrule(
        name = folder,
        srcs = sources,
        outs = ["%s/%s" % (folder, source) for source in sources],
        cmd = "python3 $(location %s) $(RULEDIR)/%s $(SRCS)" % (tool, folder),
        tools = [tool],
    )
    return folder

def cpp_tests(group):  # buildifier: disable=unnamed-macro
    """Every program of a group as a cc_test named by its path: //:tests/cpp/test_gemm.

    Args:
      group: its name in PROGRAMS.
    """
    fields = PROGRAMS[group]
    srcs, shared, hdrs = _files(fields["srcs"]), _files(fields.get("with", [])), _files(fields["hdrs"])
    includes = ["-I" + folder for folder in fields.get("includes", [])]
    deps = [":" + dep for dep in fields["deps"]]
    folder = None
    if fields.get("translate"):
        # Only translations are at hand, so that none of their originals can be included.
        cuda = library_files("cuda_headers", "hdrs") + library_files("cuda", "srcs") + srcs + hdrs
        cuda = {path: None for path in cuda if path.endswith((".cu", ".cuh"))}.keys()
        folder = _translated(group, cuda)
        includes = ["-I$(GENDIR)/" + folder] + includes
        hdrs = [path for path in hdrs if path not in cuda]
        hdrs += [folder + "/" + path for path in cuda if path.endswith(".cuh")]
        deps = [":core"]
    cc_library(
        name = group + "_headers",
        testonly = True,
        hdrs = hdrs,
        deps = deps,
    )
    for source in srcs:
        cc_test(
            name = source.rpartition(".")[0] + ("_simt" if folder else ""),
            size = "medium",
            srcs = [
                folder + "/" + path if path.endswith(".cu") else path
                for path in [source] + shared
            ],
            args = fields.get("args", []),
            copts = ["-std=c++%d" % fields.get("std", 17)] + _OPTIMIZED + includes +
                    fields.get("copts", []) + (["-xc++"] if folder else []),
            linkopts = ["-pthread"],
            linkstatic = True,  # the libraries' symbols are hidden
            tags = ["cpp"],
            deps = [":%s_headers" % group],
        )

def cuda_programs(group):  # buildifier: disable=unnamed-macro
    """Every program of a group, built by nvcc where it is found and asked for by name.

    Args:
      group: its name in PROGRAMS.
    """
    fields = PROGRAMS[group]
    headers = _files(fields["hdrs"]) + library_files("core", "hdrs")
    headers += library_files("cuda_headers", "hdrs")
    for source in _files(fields["srcs"]):
        program = source.rpartition(".")[0]
        _nvcc(
            name = program + "_by_nvcc",
            srcs = [source, ":cuda_archive"] + headers,
            outs = [program],
            command = "{nvcc} $(location %s) $(location :cuda_archive) -o $@ -ldl" % source,
            executable = True,
            tags = ["manual"],
        )
