// HALO-Q stage 2 on one CTA: sums, candidates, and placement by one warp.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"

namespace iser::cuda {

// Totals by expert and, where `copy` is given, the counts: one thread an expert, kBatch rows in
// flight. Peers wrote the counts: no read through L1.
template <int kBatch>
__device__ inline void sum_counts(const PlanConfig& config, const int32_t* counts,
                                  const PlanArrays& arrays, int32_t* copy) {
  const int32_t ranks = config.slots.num_ranks, experts = config.slots.num_experts;
  const int32_t stride = copy_stride(experts);
  for (int32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t total = 0;
    for (int32_t first = 0; first < ranks; first += kBatch) {
      int32_t value[kBatch];
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        value[i] = first + i < ranks ? __ldcg(counts + (first + i) * experts + e) : 0;
      }
#pragma unroll
      for (int32_t i = 0; i < kBatch; ++i) {
        total += value[i];
        if (copy && first + i < ranks) copy[(first + i) * stride + e] = value[i];
      }
    }
    arrays.totals[e] = total;
  }
  if (threadIdx.x == 0) arrays.scalars[kIsDense] = 0;
}

__device__ inline void sum_counts(const PlanConfig& config, const int32_t* counts,
                                  const PlanArrays& arrays, int32_t* copy) {
  if (config.slots.num_ranks <= 8) return sum_counts<8>(config, counts, arrays, copy);
  return sum_counts<32>(config, counts, arrays, copy);
}

// The rank's load and its heaviest home experts in order: one warp a rank.
__device__ inline void choose_candidates(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks, home = arrays.sizes.num_home;
  const int32_t lane = threadIdx.x % 32, limit = config.slots.num_helper_slots;
  for (int32_t r = warp_index(); r < ranks; r += blockDim.x / 32) {
    const int32_t* totals = arrays.totals + r * home;
    int32_t load = 0;
    for (int32_t h = lane; h < home; h += 32) load += totals[h];
    load = __reduce_add_sync(kFullWarp, load);
    if (lane == 0) arrays.load_before[r] = load;
    int32_t last_total = INT32_MAX, last = -1;
    for (int32_t i = 0; i < min(limit, home); ++i) {
      int32_t best = -1, at = INT32_MAX;
      for (int32_t h = lane; h < home; h += 32) {
        const int32_t total = totals[h];
        const bool is_left = total < last_total || (total == last_total && h > last);
        if (is_left && total > best) best = total, at = h;
      }
      last_total = __reduce_max_sync(kFullWarp, best);
      last = __reduce_min_sync(kFullWarp, best == last_total ? at : INT32_MAX);
      if (lane == 0) {
        arrays.candidate_expert[r * limit + i] = r * home + last;
        arrays.candidate_total[r * limit + i] = last_total;
      }
    }
  }
}

// An array over ranks held by a warp: rank 32*k + lane in element k.
template <int R>
__device__ inline int32_t value_at(const int32_t (&values)[R], int32_t rank) {
  int32_t value = __shfl_sync(kFullWarp, values[0], rank & 31);
#pragma unroll
  for (int k = 1; k < R; ++k) {
    const int32_t other = __shfl_sync(kFullWarp, values[k], rank & 31);
    if (rank >> 5 == k) value = other;
  }
  return value;
}

template <int R>
__device__ inline void prefix_sums(const int32_t (&values)[R], int32_t num_ranks,
                                   int32_t (&sums)[R]) {
  const int32_t lane = threadIdx.x % 32;
  int32_t carry = 0;
#pragma unroll
  for (int k = 0; k < R; ++k) {
    int32_t sum = values[k];
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (R == 1 && d >= num_ranks) break;
      const int32_t below = __shfl_up_sync(kFullWarp, sum, d);
      if (lane >= d) sum += below;
    }
    sums[k] = sum + carry;
    if (k + 1 < R) carry = __shfl_sync(kFullWarp, sums[k], 31);
  }
}

// The first index, in the order k then lane, where `holds` is true; -1 if nowhere.
template <int K>
__device__ inline int32_t first_true(const bool (&holds)[K]) {
  int32_t first = -1;
#pragma unroll
  for (int k = K - 1; k >= 0; --k) {
    const uint32_t ballot = __ballot_sync(kFullWarp, holds[k]);
    if (ballot) first = 32 * k + __ffs(ballot) - 1;
  }
  return first;
}

// Placement by one warp that holds R ranks and N groups a lane. Rooms need no exception for the
// owner: it is above the water level, so it has none. They do not depend on the owner either, so
// that once no group has room, every further exporter would freeze. One broadcast after the other:
// what can be derived later, by more threads, is left to index_hosts.
template <int R, int N>
__device__ void place(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t lane = threadIdx.x % 32, ranks = config.slots.num_ranks;
  const int32_t limit = config.slots.num_helper_slots;
  const int32_t exports = min(limit, arrays.sizes.num_home);
  const Nodes nodes{ranks, num_group_levels(ranks, config.min_group_size)};

  int32_t load[R], room[R], num_free[R], next[R], expert[R], total[R];
  bool is_active[R];
  uint32_t sum = 0, hottest = 0;
#pragma unroll
  for (int k = 0; k < R; ++k) {
    const int32_t r = 32 * k + lane;
    load[k] = r < ranks ? arrays.load_before[r] : 0;
    num_free[k] = limit;
    next[k] = r * limit;
    is_active[k] = r < ranks && exports > 0;
    expert[k] = is_active[k] ? arrays.candidate_expert[r * limit] : -1;
    total[k] = is_active[k] ? arrays.candidate_total[r * limit] : 0;
    sum += load[k];
    hottest = max(hottest, static_cast<uint32_t>(load[k]));
  }
  sum = __reduce_add_sync(kFullWarp, sum);
  hottest = __reduce_max_sync(kFullWarp, hottest);
  const int32_t target = (sum + ranks - 1) / ranks;
  const bool gains = 1000ll * ranks * hottest >= static_cast<int64_t>(config.gain_threshold) * sum;
#pragma unroll
  for (int k = 0; k < R; ++k) {
    room[k] = 32 * k + lane < ranks ? max(0, target - load[k]) : 0;
    is_active[k] = is_active[k] && gains;
  }

  int32_t node_begin[N], node_end[N], node_level[N], node_count[N], node_room[N];
  uint32_t members[N][R];
#pragma unroll
  for (int n = 0; n < N; ++n) {
    const int32_t node = 32 * n + lane;
    const bool is_node = node < nodes.count();
    node_level[n] = is_node ? nodes.level(node) : -1;
    node_begin[n] = is_node ? nodes.begin(node, node_level[n]) : 0;
    node_end[n] = is_node ? node_begin[n] + (ranks >> node_level[n]) : 0;
    node_count[n] = 0;
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int32_t begin = min(max(node_begin[n] - 32 * k, 0), 32);
      const int32_t end = min(max(node_end[n] - 32 * k, 0), 32);
      members[n][k] = static_cast<uint32_t>((1ull << end) - (1ull << begin));
    }
  }

  int32_t count = 0, entries = 0;
  bool is_stale = true;  // rooms of groups, full slots apart
  for (;;) {
    if (is_stale) {
      int32_t sums[R];
      prefix_sums(room, ranks, sums);
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const int32_t above = value_at(sums, (node_end[n] - 1) & 127);
        const int32_t below = value_at(sums, (node_begin[n] - 1) & 127);
        node_room[n] = node_level[n] < 0 ? 0 : above - (node_begin[n] > 0 ? below : 0);
      }
    }
    uint32_t full[R];
#pragma unroll
    for (int k = 0; k < R; ++k) full[k] = __ballot_sync(kFullWarp, num_free[k] == 0);
    int32_t open_room[N];
#pragma unroll
    for (int n = 0; n < N; ++n) {
      uint32_t taken = 0;
#pragma unroll
      for (int k = 0; k < R; ++k) taken |= full[k] & members[n][k];
      open_room[n] = taken == 0 ? node_room[n] : 0;
    }

    // The hottest exporter and its next candidate.
    int32_t key = target;
#pragma unroll
    for (int k = 0; k < R; ++k) {
      if (is_active[k]) key = max(key, load[k]);
    }
    const int32_t hot = __reduce_max_sync(kFullWarp, key);
    if (hot == target) break;
    bool is_hot[R];
#pragma unroll
    for (int k = 0; k < R; ++k) is_hot[k] = is_active[k] && load[k] == hot;
    const int32_t owner = first_true(is_hot);
    const int32_t moving = value_at(expert, owner), moving_total = value_at(total, owner);
    const int32_t amount = min(hot - target, moving_total);
    if (amount == 0) {
      is_stale = false;
#pragma unroll
      for (int k = 0; k < R; ++k) is_active[k] = is_active[k] && 32 * k + lane != owner;
      continue;
    }

    // The roomiest group of the finest level that takes it all, else the roomiest of all.
    bool fits[N], is_best[N];
#pragma unroll
    for (int n = 0; n < N; ++n) fits[n] = open_room[n] >= amount;
    const int32_t finest = first_true(fits);
    const int32_t level_of_fit = finest >= 0 ? nodes.level(finest) : -1;
    int32_t most = 0;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      is_best[n] = finest < 0 || node_level[n] == level_of_fit;
      if (is_best[n]) most = max(most, open_room[n]);
    }
    most = __reduce_max_sync(kFullWarp, most);
    if (most == 0) break;
#pragma unroll
    for (int n = 0; n < N; ++n) is_best[n] = is_best[n] && open_room[n] == most;
    const int32_t node = first_true(is_best);
    const int32_t level = nodes.level(node), begin = nodes.begin(node, level);
    const int32_t end = begin + (ranks >> level), moved_total = min(amount, most);

    // The candidate is consumed, also where the gain is too small.
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int32_t r = 32 * k + lane;
      if (r != owner) continue;
      is_active[k] = ++next[k] < r * limit + exports;
      if (is_active[k]) {
        expert[k] = arrays.candidate_expert[next[k]];
        total[k] = arrays.candidate_total[next[k]];
      }
    }
    is_stale = false;
    if (moved_total < config.min_routes) continue;

    // Coldest first: what comes before a member is the room of the colder ones.
    int32_t before[R] = {};
    if (most > amount) {
#pragma unroll 4
      for (int32_t j = begin; j < end; ++j) {
        const int32_t other = value_at(room, j);
#pragma unroll
        for (int k = 0; k < R; ++k) {
          const bool is_colder = other > room[k] || (other == room[k] && j < 32 * k + lane);
          if (is_colder) before[k] += other;
        }
      }
    }
    const bool is_left = owner < begin, is_inside = !is_left && owner < end;
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int32_t r = 32 * k + lane;
      const bool is_member = begin <= r && r < end;
      const int32_t moved = is_member ? min(max(amount - before[k], 0), room[k]) : 0;
      if (is_member) arrays.lack[entries + is_left + r - begin] = moved;
      load[k] += moved;
      room[k] -= moved;
      num_free[k] -= is_member;
      if (r != owner) continue;
      load[k] -= moved_total;
      arrays.lack[entries + (is_left                   ? 0
                             : r - begin < end - begin ? r - begin
                                                       : end - begin)] = moving_total - moved_total;
    }
    // Groups around this one lose what was moved; those inside lose all or must be summed again.
    is_stale = most > amount && level + 1 < nodes.levels;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const bool is_around = node_begin[n] <= begin && end <= node_end[n];
      const bool is_within = begin <= node_begin[n] && node_end[n] <= end;
      node_room[n] = is_around ? node_room[n] - moved_total : is_within ? 0 : node_room[n];
      if (32 * n + lane == node) arrays.helper[count] = node_count[n]++;
    }
    if (lane == 0) {
      arrays.rows[count] = Row::make(entries, begin, level, owner).word;
      arrays.expert[count] = moving;
      arrays.node[count] = node;
    }
    ++count;
    entries += end - begin + !is_inside;
  }

#pragma unroll
  for (int k = 0; k < R; ++k) {
    if (32 * k + lane < ranks) arrays.load[32 * k + lane] = load[k];
  }
#pragma unroll
  for (int n = 0; n < N; ++n) {
    if (node_level[n] < 0) continue;
    arrays.node_count[32 * n + lane] = node_count[n];
    arrays.node_foreign[32 * n + lane] = 0;
  }
  if (lane == 0) {
    arrays.scalars[kCount] = count;
    arrays.scalars[kEntries] = entries;
    arrays.scalars[kTarget] = target;
  }
}

template <int R, int N>
__device__ __noinline__ void place_apart(PlanConfig config, PlanArrays arrays) {
  place<R, N>(config, arrays);
}

__device__ inline void place(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks;
  if (ranks <= 32) {
    place_apart<1, 2>(config, arrays);
  } else if (ranks <= 96 && arrays.sizes.num_levels <= 5) {
    place_apart<3, 1>(config, arrays);
  } else {
    place_apart<4, 8>(config, arrays);
  }
}

}  // namespace iser::cuda
