"""What the C++ and CUDA sources are built into: libraries, tests and benchmarks.

Every build takes its targets from here. Bazel loads this file; CMake, scripts/sanitize.py,
tests/cuda/run.sh and the simulator's tests read it through scripts/targets.py, which understands
literals only. Paths are patterns, and `**/` in one stands for any number of folders: a new file that
a pattern matches needs no line anywhere.
"""

# For every source. The bitwise contract: a product and a sum are fused only where the source says so.
COPTS = [
    "-ffp-contract=off",
    "-fno-fast-math",
    "-Wall",
    "-Wextra",
]

# A source with such a name is compiled on every machine. On x86-64 it may use more than the baseline,
# and runs only where the CPU has it.
ISA_COPTS = {
    "_avx2.cc": [
        "-mavx2",
        "-mfma",
        "-mf16c",
    ],
    "_avx512.cc": [
        "-mavx512f",
        "-mavx512bw",
        "-mavx512vl",
        "-mfma",
    ],
}

# A library's files include the headers of that library and of its deps alone.
LIBRARIES = {
    "core": {
        "hdrs": ["ffi/core/**/*.h"],
    },
    "cpu_headers": {
        "hdrs": ["ffi/cpu/**/*.h"],
        "deps": ["core"],
    },
    "gemm": {
        "srcs": ["ffi/cpu/**/gemm*.cc"],
        "deps": ["cpu_headers"],
    },
    "cpu": {
        "srcs": ["ffi/cpu/**/*.cc"],
        "exclude": ["ffi/cpu/**/gemm*.cc"],
        "deps": ["gemm"],
    },
    "bindings": {
        "srcs": ["ffi/bindings/**/*.cc"],
        "hdrs": ["ffi/bindings/**/*.h"],
        "exclude": ["ffi/bindings/**/cuda_*.cc"],
        "deps": ["cpu"],
    },
    "cuda_headers": {
        "hdrs": [
            "ffi/cuda/**/*.cuh",
            "ffi/cuda/**/*.h",
        ],
        "deps": ["core"],
    },
    "cuda": {
        "srcs": [
            "ffi/cuda/**/*.cc",
            "ffi/cuda/**/*.cu",
        ],
        "deps": ["cuda_headers"],
    },
    "cuda_bindings": {
        "srcs": ["ffi/bindings/**/cuda_*.cc"],
        "hdrs": ["ffi/bindings/**/*.h"],
        "deps": [
            "cpu_headers",
            "cuda",
        ],
    },
}

# In each group, every file of `srcs` is a program, linked with the files of `with`.
PROGRAMS = {
    # Plain programs over the core and the CPU ops. They run under the sanitizers too.
    "cpp": {
        "srcs": ["tests/cpp/**/test_*.cc"],
        "hdrs": [
            "tests/*.h",
            "tests/cpp/**/*.h",
        ],
        "deps": [
            "cpu",
            "cuda_headers",
        ],
        "sanitizers": [
            "address",
            "thread",
        ],
    },
    # The plan's CUDA code on a CPU, one fiber per thread.
    "plan_simt": {
        "srcs": ["tests/cuda/test_plan_simt.cc"],
        "hdrs": [
            "tests/*.h",
            "tests/cuda/plan_cases.h",
            "tests/cuda/simt/*.h",
        ],
        "includes": ["tests/cuda/simt"],
        "copts": [
            "-O1",
            "-Wno-unknown-pragmas",
        ],
        "args": ["5"],
        "deps": ["cuda_headers"],
        "sanitizers": ["address"],
    },
    # The fused layer's CUDA code on a CPU: what tests/cuda/simt/translate.py makes of the GPU's test
    # program and kernels. Fortified jumps take a change of stacks for a fault.
    "moe_simt": {
        "srcs": ["tests/cuda/test_fused_moe.cu"],
        "with": [
            "ffi/cuda/**/fused_moe.cu",
            "tests/cuda/simt/grid/others.cc",
        ],
        "hdrs": [
            "tests/*.h",
            "tests/cuda/*.cuh",
            "tests/cuda/*.h",
            "tests/cuda/simt/grid/*.h",
        ],
        "translate": ["tests/cuda/simt/translate.py"],
        "includes": ["tests/cuda/simt/grid"],
        "std": 20,
        "copts": [
            "-O1",
            "-U_FORTIFY_SOURCE",
            "-w",
        ],
        "args": [
            "--small",
            "--only",
            "first:",
        ],
        "deps": ["cuda_headers"],
    },
    # On GPUs, by tests/cuda/run.sh.
    "cuda_tests": {
        "srcs": ["tests/cuda/**/test_*.cu"],
        "hdrs": [
            "tests/*.h",
            "tests/cuda/*.cuh",
            "tests/cuda/*.h",
        ],
        "deps": ["cuda"],
    },
    "cuda_benchmarks": {
        "srcs": ["benchmarks/cuda/**/bench_*.cu"],
        "hdrs": [
            "benchmarks/cuda/**/*.cuh",
            "benchmarks/cuda/**/*.h",
            "tests/*.h",
            "tests/cuda/*.cuh",
            "tests/cuda/*.h",
        ],
        "deps": ["cuda"],
    },
}
