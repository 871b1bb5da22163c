// HALO-Q stage 4 on a few warps of one CTA, and what the finished plan says of each broadcast.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"

namespace iser::cuda {

// Barrier of the repairing warps alone: the others of the CTA do something else meanwhile.
__device__ inline void repair_barrier(int32_t num_warps) {
  if (num_warps == 1) {
    __syncwarp();
  } else {
    asm volatile("bar.sync 1, %0;" ::"r"(num_warps * 32) : "memory");
  }
}

// One lane's share of a pair: the i-th row that `a` hosts, if `c` hosts it too.
struct Shared {
  int32_t entry_a, entry_c;
  bool is_shared;
};

// W lanes a pair, one for each row that a rank may host.
template <int W>
__device__ inline uint32_t lanes_of_pair() {
  return W == 32 ? kFullWarp : ((1u << (W & 31)) - 1) << (threadIdx.x % 32 / W * W);
}

template <int W>
__device__ inline Shared locate(const PlanArrays& arrays, int32_t num_ranks, int32_t num_slots,
                                int32_t n, int32_t t, int32_t pair) {
  const int32_t i = threadIdx.x % W;
  Shared shared{0, 0, false};
  if (pair < n / 2) {
    const int32_t a = haloq::ring_member(n, t, pair), c = haloq::ring_member(n, t, n - 1 - pair);
    if (a < num_ranks && c < num_ranks && i < arrays.num_hosted[a]) {
      const Hosts hosts(Row{arrays.hosted[a * 2 * num_slots + i]}, num_ranks);
      if (hosts.is_host(c)) shared = {hosts.entry(a), hosts.entry(c), true};
    }
  }
  // A broadcast never both gives and takes: with one alone, nothing can be traded.
  const uint32_t all = __ballot_sync(kFullWarp, shared.is_shared) & lanes_of_pair<W>();
  shared.is_shared = shared.is_shared && (all & (all - 1)) != 0;
  return shared;
}

// Whether this lane's pair has both something to take and something to give.
template <int W>
__device__ inline bool can_trade(int32_t lack_a, int32_t lack_c) {
  const uint32_t takes = __ballot_sync(kFullWarp, lack_a > 0 && lack_c < 0);
  const uint32_t gives = __ballot_sync(kFullWarp, lack_a < 0);
  const uint32_t lanes = lanes_of_pair<W>();
  return (takes & lanes) != 0 && (gives & lanes) != 0;
}

// One direction: haloq::trade, with running sums over the pair's lanes for its two walks.
template <int W>
__device__ inline void trade(int32_t& lack_a, int32_t& lack_c) {
  const int32_t lane = threadIdx.x % W;
  const int32_t take = haloq::smaller(haloq::positive(lack_a), haloq::positive(-lack_c));
  const int32_t give = haloq::positive(-lack_a);
  int32_t takes = take, gives = give;
#pragma unroll
  for (int d = 1; d < W; d *= 2) {
    const int32_t take_below = __shfl_up_sync(kFullWarp, takes, d, W);
    const int32_t give_below = __shfl_up_sync(kFullWarp, gives, d, W);
    if (lane >= d) takes += take_below, gives += give_below;
  }
  const int32_t amount = min(__shfl_sync(kFullWarp, takes, W - 1, W),
                             __shfl_sync(kFullWarp, gives, W - 1, W));
  const int32_t taken = min(max(amount - (takes - take), 0), take);
  const int32_t given = min(max(amount - (gives - give), 0), give);
  lack_a -= taken - given;
  lack_c += taken - given;
}

// Both directions; true on the lanes of a pair that traded.
template <int W>
__device__ inline bool trade_both(const PlanArrays& arrays, const Shared& shared) {
  if (!__any_sync(kFullWarp, shared.is_shared)) return false;
  int32_t lack_a = shared.is_shared ? arrays.lack[shared.entry_a] : 0;
  int32_t lack_c = shared.is_shared ? arrays.lack[shared.entry_c] : 0;
  const bool first = can_trade<W>(lack_a, lack_c), second = can_trade<W>(lack_c, lack_a);
  if (!__any_sync(kFullWarp, first || second)) return false;
  if (__any_sync(kFullWarp, first)) trade<W>(lack_a, lack_c);
  const bool back = can_trade<W>(lack_c, lack_a);
  if (__any_sync(kFullWarp, back)) trade<W>(lack_c, lack_a);
  if (shared.is_shared && (first || back)) {
    arrays.lack[shared.entry_a] = lack_a;
    arrays.lack[shared.entry_c] = lack_c;
  }
  return first || back;
}

template <int W>
__device__ void repair(const PlanConfig& config, const PlanArrays& arrays, int32_t num_warps) {
  const int32_t ranks = config.slots.num_ranks, slots = config.slots.num_helper_slots;
  const int32_t n = ranks + ranks % 2, rings = n - 1, pairs = n / 2;
  for (int32_t i = threadIdx.x; i < arrays.scalars[kEntries]; i += num_warps * 32) {
    arrays.lack[i] = arrays.counts[arrays.source[i]] - arrays.lack[i];
  }
  if (threadIdx.x == 0) arrays.scalars[kChangedA] = arrays.scalars[kChangedB] = -1;
  repair_barrier(num_warps);
  const int32_t stride = num_warps * (32 / W), own = threadIdx.x / W;
  // A whole round without a trade would repeat itself: nothing is left to do.
  int32_t last_change = -1;
  Shared here = locate<W>(arrays, ranks, slots, n, 0, own);
  for (int32_t step = 0; step < 2 * rings && step - last_change <= rings; ++step) {
    const int32_t t = step < rings ? step : step - rings;
    const Shared next = locate<W>(arrays, ranks, slots, n, t + 1 < rings ? t + 1 : 0, own);
    bool changed = trade_both<W>(arrays, here);
    for (int32_t first = stride; first < pairs; first += stride) {
      changed |= trade_both<W>(arrays, locate<W>(arrays, ranks, slots, n, t, own + first));
    }
    if (changed) arrays.scalars[kChangedA + (step & 1)] = step;
    repair_barrier(num_warps);
    if (arrays.scalars[kChangedA + (step & 1)] == step) last_change = step;
    here = next;
  }
}

__device__ inline int32_t lanes_per_pair(int32_t num_slots) {
  return num_slots <= 4 ? 8 : num_slots <= 8 ? 16 : 32;
}

// At most half of the CTA's warps repair; the others are free for what can run beside it.
__device__ inline int32_t num_repair_warps(const PlanConfig& config) {
  const int32_t pairs = (config.slots.num_ranks + 1) / 2;
  const int32_t lanes = pairs * lanes_per_pair(config.slots.num_helper_slots);
  return min((lanes + 31) / 32, static_cast<int32_t>(blockDim.x) / 64);
}

__device__ inline void repair(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t num_warps = num_repair_warps(config);
  switch (lanes_per_pair(config.slots.num_helper_slots)) {
    case 8: return repair<8>(config, arrays, num_warps);
    case 16: return repair<16>(config, arrays, num_warps);
    default: return repair<32>(config, arrays, num_warps);
  }
}

// Stage 3 in closed form: coarse levels come first, so the indices in use on a group are always
// 0, 1, ..., and a broadcast's is the number of those to larger groups around its own, plus its
// place within its group. One thread a broadcast.
__device__ inline int32_t helper_index(const Nodes& nodes, const PlanArrays& arrays, int32_t b) {
  const int32_t node = arrays.node[b], level = nodes.level(node);
  const int32_t group = node - nodes.first(level);
  int32_t helper = arrays.helper[b];
  for (int32_t l = 0; l < level; ++l) {
    helper += arrays.node_count[nodes.first(l) + (group >> (level - l))];
  }
  return helper;
}

// haloq::is_pure by group: no broadcast with a foreign owner, none to a larger or smaller group.
__device__ inline bool is_pure(const Nodes& nodes, const PlanArrays& arrays, int32_t node) {
  const int32_t level = nodes.level(node), group = node - nodes.first(level);
  bool pure = arrays.node_foreign[node] == 0;
  for (int32_t l = 0; l < level; ++l) {
    pure = pure && arrays.node_count[nodes.first(l) + (group >> (level - l))] == 0;
  }
  for (int32_t l = level + 1; l < nodes.levels; ++l) {
    const int32_t first = nodes.first(l) + (group << (l - level));
    for (int32_t i = 0; i < 1 << (l - level); ++i) pure = pure && arrays.node_count[first + i] == 0;
  }
  return pure;
}

// haloq::copy_way; `helper` holds helper indices by now. One thread.
__device__ inline CopyWay copy_way(const PlanConfig& config, const PlanArrays& arrays, int32_t b,
                                   const int32_t* resident) {
  const Hosts hosts(Row{arrays.rows[b]}, config.slots.num_ranks);
  bool held = resident != nullptr;
  for (int32_t r = hosts.begin; held && r < hosts.end; ++r) {
    held = resident[r * config.slots.num_helper_slots + arrays.helper[b]] == arrays.expert[b];
  }
  if (held) return CopyWay::kResident;
  if (config.copy_rule == CopyRule::kOwnerDirect) return CopyWay::kOwnerDirect;
  if (config.copy_rule == CopyRule::kSami || !hosts.contains(hosts.owner)) return CopyWay::kSami;
  const Nodes nodes{config.slots.num_ranks,
                    num_group_levels(config.slots.num_ranks, config.min_group_size)};
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
  return {arrays.expert[b],
          row.owner(),
          row.level(),
          row.begin() / (config.slots.num_ranks >> row.level()),
          arrays.helper[b],
          static_cast<int32_t>(copy_way(config, arrays, b, resident))};
}

// The quota of a rank; counts - lack, as lack is counts - quota.
__device__ inline int32_t quota_of(const PlanConfig& config, const PlanArrays& arrays, int32_t b,
                                   int32_t rank) {
  if (b >= arrays.scalars[kCount]) return 0;
  const Hosts hosts(Row{arrays.rows[b]}, config.slots.num_ranks);
  if (!hosts.is_host(rank)) return 0;
  return arrays.counts[rank * config.slots.num_experts + arrays.expert[b]] -
         arrays.lack[hosts.entry(rank)];
}

}  // namespace iser::cuda
