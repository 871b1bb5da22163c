// What `Plan` holds where a call has failed, and words to and from it, by all CTAs of a kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/cuda/protocol.cuh"

namespace iser::cuda {

__device__ inline void copy_words(int32_t* to, const int32_t* from, size_t count) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    to[i] = from[i];
  }
}

__device__ inline void fill_words(int32_t* to, int32_t value, size_t count) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    to[i] = value;
  }
}

// The arrays of a plan that there is not; `num_routes` of the device. Scalars are the caller's.
__device__ inline void fill_no_plan(const PlanOutputs& to, const SlotSpace& slots,
                                    size_t num_routes) {
  const size_t ranks = slots.num_ranks, rows = ranks * slots.num_helper_slots;
  fill_words(to.route_slot, -1, num_routes);
  fill_words(to.broadcasts, -1, 6 * rows);
  fill_words(to.quota, 0, rows * ranks);
  fill_words(to.load_before, 0, ranks);
  fill_words(to.load, 0, ranks);
}

}  // namespace iser::cuda
