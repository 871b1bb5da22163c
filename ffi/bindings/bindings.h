// What each part of the runtime adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "ffi/core/error_text.h"

namespace iser {

// A handler as jax.ffi.register_ffi_target takes it.
template <typename Handler>
nanobind::capsule capsule_of(Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

// Fields of an `IserError`, with its text.
inline nanobind::dict describe_error(const ErrorWord& e, bool has_startup_limit) {
  nanobind::dict result;
  result["code"] = e.code;
  result["rank"] = e.rank;
  result["peer"] = e.peer;
  result["layer"] = e.layer;
  result["stage"] = stage_name(static_cast<Stage>(e.stage));
  result["generation"] = e.generation;
  result["text"] = error_text(e, has_startup_limit);
  return result;
}

void bind_calls(nanobind::module_& m);
void bind_cuda_calls(nanobind::module_& m);
void bind_cuda_domain(nanobind::module_& m);
void bind_domain(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_replay(nanobind::module_& m);

}  // namespace iser
