// The extension module jax_iser._iser_cuda, beside _iser: registers and validates, nothing else.
#include <nanobind/nanobind.h>

#include "ffi/bindings/bindings.h"

NB_MODULE(_iser_cuda, m) {
  m.doc() = "CUDA kernels of jax_iser; use the Python API.";
  nanobind::module_::import_("jax_iser._iser");  // whose types the functions here take
  iser::bind_cuda_domain(m);
  iser::bind_cuda_calls(m);
}
