// Host planner: NumPy arrays in, NumPy arrays out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>

#include <optional>
#include <string>

#include "ffi/bindings/bindings.h"
#include "ffi/cpu/plan_batch.h"

namespace nb = nanobind;

namespace iser {
namespace {

using Counts = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Resident = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

template <typename T, typename... Dims>
nb::ndarray<nb::numpy, T> make_array(T** data, Dims... dims) {
  const size_t shape[] = {static_cast<size_t>(dims)...};
  size_t size = 1;
  for (size_t dim : shape) size *= dim;
  *data = new T[size ? size : 1];
  nb::capsule owner(*data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  return nb::ndarray<nb::numpy, T>(*data, sizeof...(dims), shape, owner);
}

nb::tuple plan_many(const Counts& counts, const std::optional<Resident>& resident,
                    int num_helper_slots, int min_group_size, int min_routes, int gain_threshold,
                    int copy_rule, int num_threads, bool with_flow) {
  const int32_t ranks = static_cast<int32_t>(counts.shape(1));
  const int32_t experts = static_cast<int32_t>(counts.shape(2));
  if (ranks < 1 || experts % ranks != 0 || num_helper_slots < 0 || num_helper_slots > 16) {
    throw nb::value_error("plan_many: sizes outside the planner's range");
  }
  cpu::PlanBatch batch{};
  batch.config = {{ranks, experts, num_helper_slots},
                  min_group_size,
                  min_routes,
                  gain_threshold,
                  static_cast<CopyRule>(copy_rule)};
  batch.num_plans = static_cast<int64_t>(counts.shape(0));
  batch.counts = counts.data();
  batch.resident = resident ? resident->data() : nullptr;
  if (const int64_t bad = cpu::find_bad_counts(batch); bad >= 0) {
    throw nb::value_error(("counts of plan " + std::to_string(bad) +
                           " hold a negative number, or 2147483648 routes or more; numbers of "
                           "routes are at least 0 and sum to less than 2**31")
                              .c_str());
  }
  const size_t n = counts.shape(0), rows = batch.config.max_broadcasts();
  int32_t* broadcasts;
  const auto broadcasts_array = make_array(&broadcasts, n, rows, 6);
  batch.broadcasts = reinterpret_cast<Broadcast*>(broadcasts);
  const auto quota = make_array(&batch.quota, n, rows, ranks);
  const auto before = make_array(&batch.load_before, n, ranks);
  const auto load = make_array(&batch.load, n, ranks);
  const auto num_broadcasts = make_array(&batch.num_broadcasts, n);
  const auto target = make_array(&batch.target, n);
  nb::object flow = nb::none();
  if (with_flow) flow = nb::cast(make_array(&batch.flow, n, ranks, ranks));
  {
    nb::gil_scoped_release release;
    cpu::run_plan_batch(batch, num_threads);
  }
  return nb::make_tuple(broadcasts_array, quota, before, load, num_broadcasts, target, flow);
}

}  // namespace

void bind_planner(nb::module_& m) {
  static_assert(sizeof(Broadcast) == 6 * sizeof(int32_t));
  m.def("plan_many", &plan_many, nb::arg("counts"), nb::arg("resident").none(),
        nb::arg("num_helper_slots"), nb::arg("min_group_size"), nb::arg("min_routes"),
        nb::arg("gain_threshold"), nb::arg("copy_rule"), nb::arg("num_threads"),
        nb::arg("with_flow"));
}

}  // namespace iser
