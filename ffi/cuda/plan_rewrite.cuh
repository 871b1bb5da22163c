// Histogram before the plan, and the rewrite of every route after it.
//
// Each CTA of a rank takes a contiguous part of the rank's routes, each warp a contiguous part of
// that. A route's place among its rank's routes to the same expert, in (token, k) order, is found
// with the histogram; a broadcast splits that order into runs, one a host, so the place gives both
// the slot and the position in the send list without another sort.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"

namespace iser::cuda {

// A route in one word: its expert and its place.
constexpr int32_t kPlaceBits = 22;
constexpr uint32_t kPadding = 0xffffffffu;

struct RouteRange {
  int32_t begin, end;  // of the CTA, within the rank
  int32_t warp_begin, warp_end;

  __device__ static RouteRange of(int32_t num_routes, int32_t cta, int32_t num_ctas) {
    const int32_t warps = blockDim.x / 32, warp = warp_index();
    const int32_t per_cta = (num_routes + num_ctas - 1) / num_ctas;
    RouteRange range;
    range.begin = min(cta * per_cta, num_routes);
    range.end = min(range.begin + per_cta, num_routes);
    const int32_t per_warp = (per_cta + warps * 32 - 1) / (warps * 32) * 32;
    range.warp_begin = min(range.begin + warp * per_warp, range.end);
    range.warp_end = min(range.warp_begin + per_warp, range.end);
    return range;
  }
};

// Lanes with the same value of `bits` bits.
__device__ inline uint32_t same_lanes(uint32_t value, int32_t bits) {
  uint32_t same = kFullWarp;
  for (int32_t bit = 0; bit < bits; ++bit) {
    const bool is_set = value >> bit & 1;
    const uint32_t set = __ballot_sync(kFullWarp, is_set);
    same &= is_set ? set : ~set;
  }
  return same;
}

// Fills packed[] of the CTA's routes (place within the warp's part) and counts [warps, E].
__device__ inline void rank_in_warp(const int32_t* ids, const RouteRange& range,
                                    int32_t num_experts, int32_t* warp_counts, uint32_t* packed) {
  constexpr int32_t kBatch = 8;
  const int32_t lane = threadIdx.x % 32, bits = 32 - __clz(num_experts);
  int32_t* counts = warp_counts + warp_index() * num_experts;
  for (int32_t first = range.warp_begin; first < range.warp_end; first += 32 * kBatch) {
    int32_t id[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t route = first + 32 * i + lane;
      id[i] = route < range.warp_end ? __ldg(ids + route) : -1;
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t route = first + 32 * i + lane;
      if (first + 32 * i >= range.warp_end) break;
      const bool is_valid = is_valid_expert(id[i], num_experts);
      const uint32_t same = same_lanes(is_valid ? id[i] : num_experts, bits);
      const int32_t place = __popc(same & ((1u << lane) - 1));
      const int32_t before = is_valid ? counts[id[i]] : 0;
      __syncwarp();
      if (is_valid && place == 0) counts[id[i]] = before + __popc(same);
      __syncwarp();
      if (route >= range.warp_end) continue;
      packed[route - range.begin] =
          is_valid ? static_cast<uint32_t>(id[i]) << kPlaceBits | (before + place) : kPadding;
    }
  }
}

// Turns the warps' counts into what comes before each warp; the CTA's sums go to cta_counts.
__device__ inline void sum_warps(int32_t num_experts, int32_t* warp_counts, int32_t* cta_counts) {
  const int32_t warps = blockDim.x / 32;
  for (int32_t e = threadIdx.x; e < num_experts; e += blockDim.x) {
    int32_t sum = 0;
#pragma unroll 8
    for (int32_t w = 0; w < warps; ++w) {
      const int32_t count = warp_counts[w * num_experts + e];
      warp_counts[w * num_experts + e] = sum;
      sum += count;
    }
    cta_counts[e] = sum;
  }
}

// Makes places those within the rank: adds what the warps and the CTAs before have.
__device__ inline void finish_places(const RouteRange& range, int32_t num_experts,
                                     const int32_t* warp_counts, const int32_t* before_cta,
                                     uint32_t* packed) {
  const int32_t* before_warp = warp_counts + warp_index() * num_experts;
#pragma unroll 4
  for (int32_t route = range.warp_begin + threadIdx.x % 32; route < range.warp_end; route += 32) {
    const uint32_t word = packed[route - range.begin];
    if (word == kPadding) continue;
    const int32_t e = word >> kPlaceBits;
    packed[route - range.begin] = word + before_warp[e] + before_cta[e];
  }
}

// Of each expert: its home slot and its broadcast plus one in a word, and where the slot starts.
struct HomeEntry {
  uint32_t slot_and_broadcast;
  int32_t start;

  __device__ int32_t slot() const { return slot_and_broadcast & 0xffff; }
  __device__ int32_t broadcast() const {
    return static_cast<int32_t>(slot_and_broadcast >> 16) - 1;
  }
};

// Of each broadcast, the runs that this source's places fall into: a place of run i or later is at
// least begin[i - 1]. Where there are more than four, the others begin at their `start`s.
struct __align__(16) SourceRuns {
  int32_t begin[3];
  uint32_t first_and_count;

  __device__ int32_t first() const { return first_and_count & 0xffff; }
  __device__ int32_t count() const { return first_and_count >> 16; }
};

// The CTA's routes by expert and place; null where they do not fit in shared memory.
struct ExpertOrder {
  int32_t* first;       // [E] where an expert's routes start, less the place of the first
  int32_t* num_routes;  // valid ones
  uint16_t* routes;     // [routes of the CTA]
};

// Where each expert's routes start: one warp, lanes over runs of experts.
__device__ inline void order_experts(int32_t num_experts, const int32_t* cta_counts,
                                     const int32_t* before_cta, const ExpertOrder& order) {
  const int32_t lane = threadIdx.x % 32, each = (num_experts + 31) / 32;
  const int32_t begin = min(lane * each, num_experts), end = min(begin + each, num_experts);
  int32_t own = 0;
  for (int32_t e = begin; e < end; ++e) own += cta_counts[e];
  int32_t sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int32_t below = __shfl_up_sync(kFullWarp, sum, d);
    if (lane >= d) sum += below;
  }
  if (lane == 31) *order.num_routes = sum;
  int32_t start = sum - own;
  for (int32_t e = begin; e < end; ++e) {
    order.first[e] = start - before_cta[e];
    start += cta_counts[e];
  }
}

constexpr uint16_t kNoSlot = 0xffff;

struct RewriteArrays {
  HomeEntry* home;      // [E]
  SourceRuns* runs;     // [B]
  int32_t* slot_start;  // [num_slots + 1]; counts at first
  int32_t* warp_sums;   // [warps]
  int32_t* run_begin;   // [entries + B] first place
  int32_t* run_start;   // [entries + B] where place 0 would be
  uint16_t* run_slot;   // [entries + B] or kNoSlot
};

inline void carve_rewrite(const PlanConfig& config, int32_t num_warps, Carver& carver,
                          RewriteArrays& arrays) {
  const size_t rows = config.max_broadcasts();
  arrays.home = carver.take<HomeEntry>(config.slots.num_experts);
  arrays.runs = carver.take<SourceRuns>(rows);
  arrays.slot_start = carver.take<int32_t>(config.slots.num_slots() + 1);
  arrays.warp_sums = carver.take<int32_t>(num_warps);
  arrays.run_begin = carver.take<int32_t>(3 * rows);
  arrays.run_start = carver.take<int32_t>(3 * rows);
  arrays.run_slot = carver.take<uint16_t>(3 * rows);
}

// Everything at home: what threads first..blockDim write while others place.
__device__ inline void start_rewrite(const PlanConfig& config, const PlanArrays& plan,
                                     const RewriteArrays& rewrite, int32_t source, int32_t first) {
  const int32_t home = plan.sizes.num_home, stride = home + config.slots.num_helper_slots;
  const int32_t num_slots = config.slots.num_ranks * stride;
  for (int32_t s = threadIdx.x - first; s < num_slots; s += blockDim.x - first) {
    const int32_t rank = s / stride, local = s - rank * stride, e = rank * home + local;
    const bool is_home = local < home;
    rewrite.slot_start[s] = is_home ? plan.count_of(source, e) : 0;
    if (is_home) rewrite.home[e] = {static_cast<uint32_t>(s), 0};
  }
}

// haloq::source_share for every broadcast, as running sums: one warp a broadcast.
__device__ inline void share_out(const PlanConfig& config, const PlanArrays& plan,
                                 const RewriteArrays& rewrite, int32_t source) {
  const int32_t ranks = config.slots.num_ranks;
  const int32_t home = plan.sizes.num_home, stride = home + config.slots.num_helper_slots;
  const int32_t lane = threadIdx.x % 32;
  const bool is_dense = plan.scalars[kIsDense];
  for (int32_t b = warp_index(); b < plan.scalars[kCount]; b += blockDim.x / 32) {
    const Hosts hosts(Row{plan.rows[b]}, ranks);
    const int32_t expert = plan.expert[b], helper = plan.helper[b];
    const int32_t home_slot = rewrite.home[expert].slot();
    const auto surplus_of = [&](int32_t r) {
      return hosts.is_host(r) ? haloq::positive(lack_of(plan, b, hosts, r, is_dense))
                              : plan.count_of(r, expert);
    };
    int32_t before = 0;
    for (int32_t r = lane; r < source; r += 32) before += surplus_of(r);
    before = __reduce_add_sync(kFullWarp, before);
    const int32_t own = surplus_of(source), kept = plan.count_of(source, expert) - own;
    const int32_t first_run = hosts.start + b, own_slot = source * stride + home + helper;
    int32_t carry = 0, num_runs = kept > 0;
    if (lane == 0) {
      rewrite.home[expert].slot_and_broadcast |= static_cast<uint32_t>(b + 1) << 16;
      rewrite.runs[b] = {{INT32_MAX, INT32_MAX, INT32_MAX}, 0};
      if (kept > 0) {
        rewrite.run_begin[first_run] = 0;
        rewrite.run_slot[first_run] = source == hosts.owner ? home_slot : own_slot;
      }
    }
    __syncwarp();
#pragma unroll 1
    for (int32_t first = 0; first < hosts.count(); first += 32) {
      const int32_t i = first + lane;
      const bool is_host = i < hosts.count();
      const int32_t host = is_host ? hosts.rank_at(i) : 0;
      const int32_t at = is_dense ? 32 * b + host : hosts.start + i;
      const int32_t spare = is_host ? haloq::positive(-plan.lack[at]) : 0;
      int32_t close = spare;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int32_t below = __shfl_up_sync(kFullWarp, close, d);
        if (lane >= d) close += below;
      }
      close += carry;
      carry = __shfl_sync(kFullWarp, close, 31);
      const int32_t open = close - spare;
      const int32_t taken =
          is_host ? haloq::positive(min(close, before + own) - max(open, before)) : 0;
      const uint32_t takers = __ballot_sync(kFullWarp, taken > 0);
      if (is_host) {
        const int32_t slot = host == hosts.owner ? home_slot : host * stride + home + helper;
        rewrite.slot_start[slot] = host == source ? kept + taken : taken;
        if (taken > 0) {
          const int32_t run = num_runs + __popc(takers & ((1u << lane) - 1));
          const int32_t begin = kept + max(open - before, 0);
          rewrite.run_begin[first_run + run] = begin;
          rewrite.run_slot[first_run + run] = slot;
          if (run >= 1 && run <= 3) rewrite.runs[b].begin[run - 1] = begin;
        }
      }
      num_runs += __popc(takers);
    }
    if (lane == 0) rewrite.runs[b].first_and_count = first_run | num_runs << 16;
    for (int32_t run = num_runs + lane; run <= hosts.count(); run += 32) {
      rewrite.run_slot[first_run + run] = kNoSlot;
    }
  }
}

// Counts by slot become starts: exclusive sums over the CTA. Begins after and ends with a barrier.
__device__ inline void scan_slots(int32_t num_slots, const RewriteArrays& rewrite) {
  const int32_t lane = threadIdx.x % 32, warp = warp_index();
  const int32_t each = (num_slots + blockDim.x - 1) / blockDim.x;
  const int32_t begin = min(static_cast<int32_t>(threadIdx.x) * each, num_slots);
  const int32_t end = min(begin + each, num_slots);
  int32_t own = 0;
  for (int32_t s = begin; s < end; ++s) own += rewrite.slot_start[s];
  int32_t sum = own;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int32_t below = __shfl_up_sync(kFullWarp, sum, d);
    if (lane >= d) sum += below;
  }
  if (lane == 31) rewrite.warp_sums[warp] = sum;
  __syncthreads();
  const int32_t before = lane < warp ? rewrite.warp_sums[lane] : 0;
  int32_t start = __reduce_add_sync(kFullWarp, before) + sum - own;
  for (int32_t s = begin; s < end; ++s) {
    const int32_t count = rewrite.slot_start[s];
    rewrite.slot_start[s] = start;
    start += count;
  }
  if (threadIdx.x == blockDim.x - 1) rewrite.slot_start[num_slots] = start;
  __syncthreads();
}

// After scan_slots: copies the starts to where the routes look. Ends with a barrier.
__device__ inline void spread_starts(const PlanConfig& config, const PlanArrays& plan,
                                     const RewriteArrays& rewrite) {
  for (int32_t e = threadIdx.x; e < config.slots.num_experts; e += blockDim.x) {
    rewrite.home[e].start = rewrite.slot_start[rewrite.home[e].slot()];
  }
  const int32_t num_runs = plan.scalars[kEntries] + plan.scalars[kCount];
  for (int32_t i = threadIdx.x; i < num_runs; i += blockDim.x) {
    const uint16_t slot = rewrite.run_slot[i];
    if (slot != kNoSlot) rewrite.run_start[i] = rewrite.slot_start[slot] - rewrite.run_begin[i];
  }
  __syncthreads();
}

// The run of the source's `place`-th route to a replicated expert.
__device__ inline int32_t run_of(const RewriteArrays& rewrite, const SourceRuns& runs,
                                 int32_t place) {
  int32_t run = (place >= runs.begin[0]) + (place >= runs.begin[1]) + (place >= runs.begin[2]);
  if (run == 3) {
    while (run + 1 < runs.count() && place >= rewrite.run_begin[runs.first() + run + 1]) ++run;
  }
  return runs.first() + run;
}

// Slots of the CTA's routes, and where each goes in the send list, in place of its packed word. A
// batch's loads are in flight together.
__device__ inline void rewrite_routes(const RewriteArrays& rewrite, const RouteRange& range,
                                      const ExpertOrder& order, uint32_t* packed,
                                      int32_t* route_slot, int32_t* send_routes) {
  constexpr int32_t kBatch = 6;
  const int32_t lane = threadIdx.x % 32;
#pragma unroll 1
  for (int32_t first = range.warp_begin; first < range.warp_end; first += 32 * kBatch) {
    int32_t place[kBatch], slot[kBatch], start[kBatch], broadcast[kBatch];
    bool is_valid[kBatch];
    HomeEntry home[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t route = first + 32 * i + lane;
      const uint32_t word = route < range.warp_end ? packed[route - range.begin] : kPadding;
      is_valid[i] = word != kPadding;
      place[i] = word & ((1u << kPlaceBits) - 1);
      slot[i] = is_valid[i] ? word >> kPlaceBits : 0;
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      home[i] = rewrite.home[slot[i]];
      start[i] = order.routes ? order.first[slot[i]] : 0;
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t route = first + 32 * i + lane;
      if (is_valid[i] && order.routes) order.routes[start[i] + place[i]] = route - range.begin;
      slot[i] = home[i].slot();
      start[i] = home[i].start;
      broadcast[i] = is_valid[i] ? home[i].broadcast() : -1;
    }
    SourceRuns runs[kBatch];
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (broadcast[i] >= 0) runs[i] = rewrite.runs[broadcast[i]];
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (broadcast[i] >= 0) broadcast[i] = run_of(rewrite, runs[i], place[i]);
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      if (broadcast[i] < 0) continue;
      slot[i] = rewrite.run_slot[broadcast[i]];
      start[i] = rewrite.run_start[broadcast[i]];
    }
#pragma unroll
    for (int32_t i = 0; i < kBatch; ++i) {
      const int32_t route = first + 32 * i + lane;
      if (route >= range.warp_end) continue;
      route_slot[route] = is_valid[i] ? slot[i] : -1;
      if (order.routes) {
        packed[route - range.begin] = start[i] + place[i];
      } else if (is_valid[i]) {
        send_routes[start[i] + place[i]] = route;
      }
    }
  }
}

// After a barrier: the send list by expert and place, so that neighbours go to neighbours.
__device__ inline void store_ordered(const RouteRange& range, const ExpertOrder& order,
                                     const uint32_t* packed, int32_t* send_routes) {
  const int32_t count = *order.num_routes;
#pragma unroll 4
  for (int32_t i = threadIdx.x; i < count; i += blockDim.x) {
    const int32_t route = order.routes[i];
    send_routes[packed[route]] = range.begin + route;
  }
}

}  // namespace iser::cuda
