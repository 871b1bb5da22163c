// The plan of one CTA from counts to broadcasts and quotas, and its way out of shared memory.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"
#include "ffi/cuda/plan_place.cuh"
#include "ffi/cuda/plan_repair.cuh"

namespace iser::cuda {

// Stages 2 to 4. `beside_place` runs on the threads that do not place, and gets the first of them.
// Ends with a barrier.
template <typename Stamps, typename BesidePlace>
__device__ void derive(const PlanConfig& config, const int32_t* counts, PlanArrays& arrays,
                       int32_t* copy, const Stamps& stamps, BesidePlace beside_place) {
  const int32_t warp = warp_index();
  sum_counts(config, counts, arrays, copy);
  arrays.counts = copy ? copy : counts;
  __syncthreads();
  choose_candidates(config, arrays);
  __syncthreads();
  stamps.mark(PlanStamp::kSummed);
  if (warp == 0) {
    place(config, arrays);
  } else {
    clear_schedule(config, arrays, 32);
    beside_place(32);
  }
  __syncthreads();
  stamps.mark(PlanStamp::kPlaced);
  if (arrays.scalars[kCount] > 0) {
    index_hosts(config, arrays);
    __syncthreads();
    find_pairs(config, arrays);
    __syncthreads();
    if (warp == 0) {
      level_pairs(config, arrays);
    } else {
      const Nodes nodes{config.slots.num_ranks,
                        num_group_levels(config.slots.num_ranks, config.min_group_size)};
      for (int32_t b = threadIdx.x - 32; b < arrays.scalars[kCount]; b += blockDim.x - 32) {
        arrays.helper[b] = helper_index(nodes, arrays, b);
      }
    }
    __syncthreads();
    schedule_pairs(config, arrays);
    __syncthreads();
    prepare_pairs(config, arrays);
    __syncthreads();
    if (warp < num_repair_warps(config)) repair(config, arrays);
    __syncthreads();
  }
  stamps.mark(PlanStamp::kRepaired);
}

// The broadcast rows, the loads and the hash: one CTA, which needs a barrier before it reads the
// hash in arrays.hash.
__device__ inline void write_rows(const PlanConfig& config, const PlanArrays& arrays,
                           const int32_t* resident, Broadcast* broadcasts, int32_t* load_before,
                           int32_t* load, int32_t* num_broadcasts) {
  const int32_t count = arrays.scalars[kCount];
  uint64_t hash = threadIdx.x == 0 ? hash_term(0, count) : 0;
  for (int32_t b = threadIdx.x; b < config.max_broadcasts(); b += blockDim.x) {
    const Broadcast row = broadcast_row(config, arrays, b, resident);
    broadcasts[b] = row;
    if (b < count) hash += broadcast_terms(config, row, b);
  }
  const int32_t ranks = config.slots.num_ranks;
  for (int32_t b = warp_index(); b < count; b += blockDim.x / 32) {
    for (int32_t r = threadIdx.x % 32; r < ranks; r += 32) {
      hash += quota_term(config, b, r, quota_of(config, arrays, b, r));
    }
  }
  for (int d = 16; d > 0; d /= 2) hash += __shfl_xor_sync(kFullWarp, hash, d);
  if (threadIdx.x % 32 == 0) {
    atomicAdd(reinterpret_cast<unsigned long long*>(arrays.hash),
              static_cast<unsigned long long>(hash));
  }
  for (int32_t r = threadIdx.x; r < ranks; r += blockDim.x) {
    load_before[r] = arrays.load_before[r];
    load[r] = arrays.load[r];
  }
  if (threadIdx.x == 0) *num_broadcasts = count;
}

// Quotas of all rows, one warp a row, spread over the CTAs of the device.
__device__ inline void write_quota(const PlanConfig& config, const PlanArrays& arrays, int32_t* quota,
                            int32_t cta, int32_t num_ctas) {
  const int32_t ranks = config.slots.num_ranks, warps = blockDim.x / 32;
  for (int32_t b = warp_index() * num_ctas + cta; b < config.max_broadcasts();
       b += warps * num_ctas) {
    for (int32_t r = threadIdx.x % 32; r < ranks; r += 32) {
      quota[b * ranks + r] = quota_of(config, arrays, b, r);
    }
  }
}

}  // namespace iser::cuda
