// The extension module jax_iser._iser: registers and validates, nothing else.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include "ffi/bindings/bindings.h"

NB_MODULE(_iser, m) {
  m.doc() = "Kernels and runtime of jax_iser; use the Python API.";
  iser::bind_planner(m);
  iser::bind_replay(m);
  iser::bind_domain(m);
  iser::bind_calls(m);
}
