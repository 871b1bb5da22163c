// What each part of the runtime adds to the extension module.
#pragma once

#include <nanobind/nanobind.h>

namespace iser {

void bind_calls(nanobind::module_& m);
void bind_domain(nanobind::module_& m);
void bind_planner(nanobind::module_& m);
void bind_replay(nanobind::module_& m);

}  // namespace iser
