"""Matrix products that could compute an expert on one CPU thread, behind one signature.

A candidate's `gemm(place(x [m, k]), place(w [n, k]), out [m, n])` computes `x w^T` in f32 on the
calling thread, without the GIL, and returns it: in `out`, or as an array of its own. Libraries are
not part of the build: one that is missing is skipped, with the reason.
"""

import ctypes
import os
import pathlib
import platform
import subprocess
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
FLOATS = ctypes.POINTER(ctypes.c_float)
# What makes each library and compiler keep to an instruction set, as `ISER_CPU_ISA` does here.
ONE_THREAD_XLA = "--xla_cpu_multi_thread_eigen=false"
ISA_ENVIRONMENT = {
    "avx512": {
        "OPENBLAS_CORETYPE": "SkylakeX",
        "ISER_CPU_ISA": "avx512",
        "XLA_FLAGS": ONE_THREAD_XLA,
    },
    "avx2": {
        "OPENBLAS_CORETYPE": "Haswell",
        "DNNL_MAX_CPU_ISA": "AVX2",
        "LIBXSMM_TARGET": "hsw",
        "ISER_CPU_ISA": "avx2",
        "XLA_FLAGS": f"{ONE_THREAD_XLA} --xla_cpu_max_isa=AVX2",
    },
    "neon": {"ISER_CPU_ISA": "neon", "XLA_FLAGS": ONE_THREAD_XLA},
}
MARCH = {"avx512": "x86-64-v4", "avx2": "x86-64-v3", "neon": "armv8-a"}
FILE_FLAGS = {
    "gemm_avx2.cc": ["-mavx2", "-mfma"],
    "gemm_avx512.cc": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma"],
}

Gemm = Callable[[Any, Any, np.ndarray], Any]


class Candidate(NamedTuple):
    name: str
    version: str
    gemm: Gemm
    place: Callable[[np.ndarray], Any] = np.asarray


class MissingError(Exception):
    """Why a candidate cannot run here."""


def compile_(arguments: list[str]) -> None:
    command = [os.environ.get("CXX", "c++"), "-std=c++17", "-O3", "-fPIC", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        lines = done.stderr.splitlines()
        raise MissingError(
            next((line for line in lines if "error" in line or "cannot" in line), lines[0])
        )


def as_gemm(library: ctypes.CDLL) -> Gemm:
    function = library.gemm
    function.restype = None
    function.argtypes = [ctypes.c_int] * 3 + [FLOATS] * 3

    def gemm(x: np.ndarray, w: np.ndarray, out: np.ndarray) -> np.ndarray:
        pointers = (array.ctypes.data_as(FLOATS) for array in (x, w, out))
        function(len(x), len(w), x.shape[1], *pointers)
        return out

    return gemm


def version_of(library: ctypes.CDLL) -> str:
    library.version.restype = ctypes.c_char_p
    return library.version().decode()


def load_ours(folder: pathlib.Path) -> ctypes.CDLL:
    """This project's kernel, from its sources."""
    on_x86 = platform.machine() in ("x86_64", "AMD64")
    objects = []
    driver = ROOT / "benchmarks" / "cpp" / "gemm_ours.cc"
    for source in [driver, *sorted((ROOT / "ffi" / "cpu").glob("gemm*.cc"))]:
        objects.append(str(folder / f"{source.stem}.o"))
        flags = FILE_FLAGS.get(source.name, []) if on_x86 else []
        compile_([*flags, "-ffp-contract=off", f"-I{ROOT}", "-c", str(source), "-o", objects[-1]])
    compile_(["-shared", *objects, "-o", str(folder / "ours.so")])
    return ctypes.CDLL(str(folder / "ours.so"))


def load_library(name: str, flags: list[str], isa: str, folder: pathlib.Path) -> Candidate:
    """A candidate compiled from benchmarks/cpp/gemm_<name>.cc."""
    source = pathlib.Path("benchmarks", "cpp", f"gemm_{name}.cc")
    target = folder / f"{name}.so"
    compile_(["-shared", f"-march={MARCH[isa]}", str(source), "-o", str(target), *flags])
    library = ctypes.CDLL(str(target))
    return Candidate(name, version_of(library), as_gemm(library))


def set_openblas_threads(marker: str, num_threads: int) -> None:
    """Sets the threads of the OpenBLAS whose loaded file's path contains `marker`."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if "openblas" in line and marker in line}
    for path in paths:
        library = ctypes.CDLL(path)
        for suffix in ("", "64_"):
            setter = getattr(library, f"scipy_openblas_set_num_threads{suffix}", None)
            if setter:
                return setter(num_threads)
    raise MissingError(f"found no OpenBLAS of {marker} whose threads can be set")


def load_openblas() -> Candidate:
    """The sgemm that SciPy exports for Cython."""
    import scipy
    from scipy.linalg import cython_blas

    set_openblas_threads("scipy.libs", 1)
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    capsule = cython_blas.__pyx_capi__["sgemm"]
    sgemm = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 13)(get_pointer(capsule, get_name(capsule)))
    one, zero = ctypes.c_float(1), ctypes.c_float(0)

    def gemm(x: np.ndarray, w: np.ndarray, out: np.ndarray) -> np.ndarray:
        m, n, k = (ctypes.c_int(size) for size in (len(w), len(x), x.shape[1]))
        ref = ctypes.byref
        a, b, c = (array.ctypes.data for array in (w, x, out))  # column-major: out^T = w x^T
        arguments = (b"T", b"N", ref(m), ref(n), ref(k), ref(one), a, ref(k), b, ref(k))
        sgemm(*arguments, ref(zero), c, ref(m))
        return out

    return Candidate("openblas", f"scipy {scipy.__version__}", gemm)


def load_xla() -> Candidate:
    """XLA's own dot, one thread a call: a yardstick, since a custom call cannot call it."""
    import jax

    dot = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))

    def gemm(x: jax.Array, w: jax.Array, out: np.ndarray) -> jax.Array:
        return dot(x, w).block_until_ready()

    return Candidate("xla", f"jax {jax.__version__}", gemm, jax.device_put)


def load_all(isa: str, folder: pathlib.Path) -> tuple[list[Candidate], dict[str, str]]:
    """The candidates that work here, and why the others do not."""
    loaders: dict[str, Callable[[], Candidate]] = {
        "openblas": load_openblas,
        "eigen": lambda: load_library("eigen", ["-I/usr/include/eigen3"], isa, folder),
        "onednn": lambda: load_library("onednn", ["-fopenmp", "-ldnnl"], isa, folder),
        "libxsmm": lambda: load_library("libxsmm", ["-lxsmm", "-lxsmmnoblas"], isa, folder),
        "xla": load_xla,
    }
    found, skipped = [], {}
    for name, load in loaders.items():
        try:
            found.append(load())
        except (MissingError, ImportError, OSError) as error:
            skipped[name] = str(error)
    return found, skipped
