// What each part of the runtime adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace iser {

// A handler as jax.ffi.register_ffi_target takes it.
template <typename Handler>
nanobind::capsule capsule_of(Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

void bind_calls(nanobind::module_& m);
void bind_cuda_calls(nanobind::module_& m);
void bind_cuda_domain(nanobind::module_& m);
void bind_domain(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_replay(nanobind::module_& m);

}  // namespace iser
