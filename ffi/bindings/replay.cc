// Replay of count matrices: NumPy arrays in, a table of figures out.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <vector>

#include "ffi/bindings/bindings.h"
#include "ffi/cpu/replay.h"

namespace nb = nanobind;

namespace iser {
namespace {

using Counts = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Slots = nb::ndarray<int32_t, nb::ndim<4>, nb::c_contig, nb::device::cpu>;
using Figures = nb::ndarray<int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

void check_shapes(const std::vector<Counts>& counts, const Slots& slots, const Figures& figures) {
  const size_t iterations = counts.size();
  const size_t layers = figures.shape(1), ranks = slots.shape(2), size = slots.shape(3);
  bool fits = iterations > 0 && slots.shape(0) == iterations + 1 && slots.shape(1) == layers &&
              figures.shape(0) == iterations && figures.shape(2) == cpu::kNumReplayFigures &&
              ranks >= 1 && size <= 16;
  for (const Counts& each : counts) {
    fits = fits && each.shape(0) == layers && each.shape(1) == ranks &&
           each.shape(2) == counts[0].shape(2) && each.shape(2) % ranks == 0;
  }
  if (!fits) throw nb::value_error("replay_many: shapes of counts, slots and figures do not agree");
}

void replay_many(const std::vector<Counts>& counts, Slots slots, Figures figures,
                 int min_group_size, int min_routes, int gain_threshold, int copy_rule) {
  check_shapes(counts, slots, figures);
  std::vector<const int32_t*> pointers;
  for (const Counts& each : counts) pointers.push_back(each.data());
  cpu::ReplayBatch batch{};
  batch.config = {{static_cast<int32_t>(slots.shape(2)), static_cast<int32_t>(counts[0].shape(2)),
                   static_cast<int32_t>(slots.shape(3))},
                  min_group_size,
                  min_routes,
                  gain_threshold,
                  static_cast<CopyRule>(copy_rule)};
  batch.num_iterations = static_cast<int64_t>(counts.size());
  batch.num_layers = static_cast<int64_t>(figures.shape(1));
  batch.counts = pointers.data();
  batch.slots = slots.data();
  batch.figures = figures.data();
  nb::gil_scoped_release release;
  cpu::run_replay_batch(batch);
}

}  // namespace

void bind_replay(nb::module_& m) {
  m.def("replay_many", &replay_many, nb::arg("counts"), nb::arg("slots"), nb::arg("figures"),
        nb::arg("min_group_size"), nb::arg("min_routes"), nb::arg("gain_threshold"),
        nb::arg("copy_rule"));
}

}  // namespace iser
