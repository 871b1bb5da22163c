// The plan of one CTA from counts to broadcasts and quotas, and its way out of shared memory.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"
#include "ffi/cuda/plan_place.cuh"
#include "ffi/cuda/plan_repair.cuh"
#include "ffi/cuda/plan_warp.cuh"
#include "ffi/cuda/plan_waves.cuh"

namespace iser::cuda {

// Stage 3 in closed form: coarse levels come first, so the indices in use on a group are always
// 0, 1, ..., and a broadcast's is the number of those to larger groups around its own, plus its
// place within its group. One thread a broadcast.
__device__ inline int32_t helper_index(const Nodes& nodes, const PlanArrays& arrays, int32_t b) {
  const int32_t node = arrays.node[b], level = nodes.level(node);
  const int32_t group = node - nodes.first(level);
  int32_t helper = arrays.helper[b];
#pragma unroll 1
  for (int32_t l = 0; l < level; ++l) {
    helper += arrays.node_count[nodes.first(l) + (group >> (level - l))];
  }
  return helper;
}

// haloq::is_pure by group: no broadcast with a foreign owner, none to a larger or smaller group.
__device__ inline bool is_pure(const Nodes& nodes, const PlanArrays& arrays, int32_t node) {
  const int32_t level = nodes.level(node), group = node - nodes.first(level);
  bool pure = arrays.node_foreign[node] == 0;
#pragma unroll 1
  for (int32_t l = 0; l < level; ++l) {
    pure = pure && arrays.node_count[nodes.first(l) + (group >> (level - l))] == 0;
  }
#pragma unroll 1
  for (int32_t l = level + 1; l < nodes.levels; ++l) {
    const int32_t first = nodes.first(l) + (group << (l - level));
#pragma unroll 1
    for (int32_t i = 0; i < 1 << (l - level); ++i) pure = pure && arrays.node_count[first + i] == 0;
  }
  return pure;
}

// haloq::copy_way; `helper` holds helper indices by now. One thread.
__device__ inline CopyWay copy_way(const PlanConfig& config, const PlanArrays& arrays, int32_t b,
                                   const int32_t* resident) {
  const Hosts hosts(Row{arrays.rows[b]}, config.slots.num_ranks);
  bool held = resident != nullptr;
#pragma unroll 1
  for (int32_t r = hosts.begin; held && r < hosts.end; ++r) {
    held = resident[r * config.slots.num_helper_slots + arrays.helper[b]] == arrays.expert[b];
  }
  if (held) return CopyWay::kResident;
  if (config.copy_rule == CopyRule::kOwnerDirect) return CopyWay::kOwnerDirect;
  if (config.copy_rule == CopyRule::kSami || !hosts.contains(hosts.owner)) return CopyWay::kSami;
  const Nodes nodes{config.slots.num_ranks, arrays.sizes.num_levels};
  const int32_t level = nodes.level(arrays.node[b]);
  const bool is_widest = arrays.widest[hosts.owner] == (level << 16 | b);
  return is_widest || is_pure(nodes, arrays, arrays.node[b]) ? CopyWay::kOwnerDirect
                                                             : CopyWay::kSami;
}

// The broadcast's row of the plan. One thread, after the helper indices.
__device__ inline Broadcast broadcast_row(const PlanConfig& config, const PlanArrays& arrays,
                                          int32_t b, const int32_t* resident) {
  if (b >= arrays.scalars[kCount]) return {-1, -1, -1, -1, -1, -1};
  const Row row{arrays.rows[b]};
  const Nodes nodes{config.slots.num_ranks, arrays.sizes.num_levels};
  return {arrays.expert[b], row.owner(),
          row.level(),      arrays.node[b] - nodes.first(row.level()),
          arrays.helper[b], static_cast<int32_t>(copy_way(config, arrays, b, resident))};
}

// The quota of a rank; counts - lack, as lack is counts - quota.
__device__ inline int32_t quota_of(const PlanConfig& config, const PlanArrays& arrays, int32_t b,
                                   int32_t rank) {
  if (b >= arrays.scalars[kCount]) return 0;
  const Hosts hosts(Row{arrays.rows[b]}, config.slots.num_ranks);
  if (!hosts.is_host(rank)) return 0;
  return arrays.count_of(rank, arrays.expert[b]) -
         lack_of(arrays, b, hosts, rank, arrays.scalars[kIsDense]);
}

// Helper indices, by threads first..blockDim, each of which goes on with `use` of its broadcast.
template <typename Use>
__device__ inline void find_helpers(const PlanConfig& config, const PlanArrays& arrays,
                                    int32_t first, Use use) {
  const Nodes nodes{config.slots.num_ranks, arrays.sizes.num_levels};
  const int32_t count = arrays.scalars[kCount];
#pragma unroll 1
  for (int32_t b = threadIdx.x - first; b < config.max_broadcasts(); b += blockDim.x - first) {
    if (b < count) arrays.helper[b] = helper_index(nodes, arrays, b);
    use(b);
  }
}

// Stage 4 for any number of ranks and broadcasts; `beside_levels` runs on the threads that do not
// put pairs into levels, and gets the first of them.
template <typename BesideLevels>
__device__ inline void repair_by_levels(const PlanConfig& config, const PlanArrays& arrays,
                                        BesideLevels beside_levels) {
  const int32_t warp = warp_index();
  if (arrays.scalars[kCount] > 0) {
    index_hosts(config, arrays);
    __syncthreads();
    find_pairs(config, arrays);
    clear_schedule(config, arrays);
    __syncthreads();
    if (warp == 0) {
      level_pairs(config, arrays);
    } else {
      beside_levels(32);
    }
    __syncthreads();
    schedule_pairs(config, arrays);
    __syncthreads();
    prepare_pairs(config, arrays);
    __syncthreads();
    if (warp < num_repair_warps(config)) repair(config, arrays);
  } else {
    beside_levels(0);
  }
}

// Stages 2 to 4. `beside_place` runs on the threads that do not place, and gets the first of them;
// `use_row` once for each row that a plan may have, when all but its quotas is known, beside
// repair. Ends with a barrier. kOnWarp: for up to 32 ranks.
template <bool kOnWarp, typename Stamps, typename BesidePlace, typename UseRow>
__device__ void derive(const PlanConfig& config, const int32_t* counts, PlanArrays& arrays,
                       int32_t* copy, const Stamps& stamps, BesidePlace beside_place,
                       UseRow use_row) {
  const int32_t warp = warp_index();
  sum_counts(config, counts, arrays, copy);
  arrays.counts = copy ? copy : counts;
  arrays.count_stride = copy ? copy_stride(config.slots.num_experts) : config.slots.num_experts;
  __syncthreads();
  choose_candidates(config, arrays);
  __syncthreads();
  stamps.mark(PlanStamp::kSummed);
  RankMasks<uint64_t> masks{};
  if (warp != 0) {
    beside_place(32);
  } else if (kOnWarp) {
    place_on_warp(config, arrays, masks);
  } else {
    place(config, arrays);
  }
  __syncthreads();
  stamps.mark(PlanStamp::kPlaced);
  const auto use_rows = [&](int32_t first) { find_helpers(config, arrays, first, use_row); };
  if (!kOnWarp) {
    repair_by_levels(config, arrays, use_rows);
  } else if (__builtin_expect(!arrays.scalars[kIsDense], 0)) {  // more than one warp takes
    if (warp == 0) place(config, arrays);
    __syncthreads();
    repair_by_levels(config, arrays, use_rows);
  } else if (warp == 0) {
    repair_on_warp(config, arrays, masks);
  } else {
    finish_rows(config, arrays, 32);
    named_barrier(blockDim.x - 32);
    use_rows(32);
  }
  __syncthreads();
  stamps.mark(PlanStamp::kRepaired);
}

// A row of the plan with its share of the hash: derive's `use_row`.
__device__ inline void write_row(const PlanConfig& config, const PlanArrays& arrays, int32_t b,
                                 const int32_t* resident, Broadcast* broadcasts, uint64_t& hash) {
  const Broadcast row = broadcast_row(config, arrays, b, resident);
  broadcasts[b] = row;
  if (b < arrays.scalars[kCount]) hash += broadcast_terms(config, row, b);
}

// After derive: the loads, and the hash to which the threads have `hash` to add. The hash is whole
// after a barrier.
__device__ inline void write_loads(const PlanConfig& config, const PlanArrays& arrays,
                                   uint64_t hash, int32_t* load_before, int32_t* load,
                                   int32_t* num_broadcasts) {
  const int32_t ranks = config.slots.num_ranks, count = arrays.scalars[kCount];
  if (threadIdx.x == 0) hash += hash_term(0, count);
#pragma unroll 1
  for (int32_t b = warp_index(); b < count; b += blockDim.x / 32) {
#pragma unroll 1
    for (int32_t r = threadIdx.x % 32; r < ranks; r += 32) {
      hash += quota_term(config, b, r, quota_of(config, arrays, b, r));
    }
  }
  for (int d = 16; d > 0; d /= 2) hash += __shfl_xor_sync(kFullWarp, hash, d);
  if (threadIdx.x % 32 == 0 && hash != 0) {
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
__device__ inline void write_quota(const PlanConfig& config, const PlanArrays& arrays,
                                   int32_t* quota, int32_t cta, int32_t num_ctas) {
  const int32_t ranks = config.slots.num_ranks, warps = blockDim.x / 32;
  for (int32_t b = warp_index() * num_ctas + cta; b < config.max_broadcasts();
       b += warps * num_ctas) {
    for (int32_t r = threadIdx.x % 32; r < ranks; r += 32) {
      quota[b * ranks + r] = quota_of(config, arrays, b, r);
    }
  }
}

}  // namespace iser::cuda
