// HALO-Q stage 4 on a few warps of one CTA.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"

namespace iser::cuda {

// The rank that `rank` meets in ring t; n - 1 meets whoever would meet itself.
__device__ inline int32_t ring_partner(int32_t n, int32_t t, int32_t rank) {
  int32_t i = rank == n - 1 ? 0 : rank - t + 1;
  if (i <= 0 && rank != n - 1) i += n - 1;
  return haloq::ring_member(n, t, n - 1 - i);
}

// What the ranks host, and what each lacks of it: one warp a rank, its lanes over broadcasts.
__device__ inline void index_hosts(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks, limit = 2 * config.slots.num_helper_slots;
  const int32_t lane = threadIdx.x % 32, count = arrays.scalars[kCount];
  for (int32_t r = warp_index(); r < ranks; r += blockDim.x / 32) {
    int32_t num_hosted = 0, widest = INT32_MAX;
    for (int32_t first = 0; first < count; first += 32) {
      const int32_t b = first + lane;
      const Row row{b < count ? arrays.rows[b] : 0};
      const Hosts hosts(row, ranks);
      const bool is_host = b < count && hosts.is_host(r);
      const uint32_t all = __ballot_sync(kFullWarp, is_host);
      if (is_host) {
        const int32_t entry = hosts.entry(r);
        arrays.hosted[r * limit + num_hosted + __popc(all & ((1u << lane) - 1))] = row.word;
        arrays.lack[entry] = arrays.count_of(r, arrays.expert[b]) - arrays.lack[entry];
        if (r == hosts.owner && hosts.contains(r)) widest = min(widest, row.level() << 16 | b);
        if (r == hosts.owner && !hosts.contains(r)) arrays.node_foreign[arrays.node[b]] = 1;
      }
      if (lane == 0) arrays.hosts[first / 32 * ranks + r] = all;
      num_hosted += __popc(all);
    }
    widest = __reduce_min_sync(kFullWarp, widest);
    if (lane == 0) {
      arrays.num_hosted[r] = num_hosted;
      arrays.widest[r] = widest;
    }
  }
}

// Which of a rank's pairs can trade at all: one warp a rank, its lanes over rings. A broadcast
// never both gives and takes, so pairs that share fewer than two never trade.
__device__ inline void find_pairs(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks, n = ranks + ranks % 2;
  const int32_t lane = threadIdx.x % 32, words = (arrays.scalars[kCount] + 31) / 32;
  for (int32_t r = warp_index(); r < ranks; r += blockDim.x / 32) {
    for (int32_t first = 0; first < n - 1; first += 32) {
      const int32_t t = first + lane, partner = ring_partner(n, t, r);
      int32_t shared = 0;
      if (t < n - 1 && partner < ranks) {
        for (int32_t w = 0; w < words; ++w) {
          shared += __popc(arrays.hosts[w * ranks + r] & arrays.hosts[w * ranks + partner]);
        }
      }
      const uint32_t can = __ballot_sync(kFullWarp, shared >= 2);
      if (lane == 0) arrays.can_trade[first / 32 * ranks + r] = can;
    }
  }
}

// Gives each of those pairs a level, by one warp: one more than all earlier pairs with one of its
// ranks. Pairs of one level have no rank in common, so the levels, one after the other, do what the
// rings do.
template <int R>
__device__ void level_pairs(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks, lane = threadIdx.x % 32;
  const int32_t n = ranks + ranks % 2;
  int32_t level[R] = {}, partner[R];
  uint32_t can[R] = {};
#pragma unroll
  for (int k = 0; k < R; ++k) {
    const int32_t r = 32 * k + lane;  // the partner of ring -1
    partner[k] = r == n - 1 ? n - 3 : 2 * (n - 1) - 4 - r;
    while (partner[k] >= n - 1) partner[k] -= n - 1;
    while (partner[k] < 0) partner[k] += n - 1;
  }
  for (int32_t t = 0; t < n - 1; ++t) {
    int32_t other[R];
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int32_t r = 32 * k + lane;
      if (t % 32 == 0 && r < ranks) can[k] = arrays.can_trade[t / 32 * ranks + r];
      // From ring to ring the last rank's partner moves by one, every other's by two.
      partner[k] += r == n - 1 ? 1 : 2;
      if (partner[k] >= n - 1) partner[k] -= n - 1;
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int32_t r = 32 * k + lane;
      other[k] = value_at(level, (partner[k] == r ? n - 1 : partner[k]) & 127);
    }
#pragma unroll
    for (int k = 0; k < R; ++k) {
      const int32_t r = 32 * k + lane;
      if (can[k] >> (t & 31) & 1) {
        other[k] = max(level[k], other[k]);
        arrays.level[t * ranks + r] = other[k];
        level[k] = other[k] + 1;
      }
    }
  }
  int32_t levels = 0;
#pragma unroll
  for (int k = 0; k < R; ++k) levels = max(levels, level[k]);
  levels = __reduce_max_sync(kFullWarp, levels);
  if (lane == 0) {
    arrays.scalars[kLevels] = levels;
    arrays.scalars[kPairs] = 0;
    arrays.scalars[kChangedA] = arrays.scalars[kChangedB] = -1;
    arrays.lack[arrays.scalars[kEntries]] = 0;
  }
}

// Numbers the pairs, in any order, and enters them by level and first rank.
__device__ inline void schedule_pairs(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks, n = ranks + ranks % 2;
  for (int32_t t = warp_index(); t < n - 1; t += blockDim.x / 32) {
    for (int32_t i = threadIdx.x % 32; i < n / 2; i += 32) {
      const int32_t a = haloq::ring_member(n, t, i), c = haloq::ring_member(n, t, n - 1 - i);
      if (a >= ranks || (arrays.can_trade[t / 32 * ranks + a] >> (t & 31) & 1) == 0) continue;
      const int32_t pair = atomicAdd(&arrays.scalars[kPairs], 1);
      arrays.pairs[pair] = a | c << 8;
      arrays.schedule[arrays.level[t * ranks + a] * ranks + a] = pair;
    }
  }
}

// Before schedule_pairs: nothing is scheduled.
__device__ inline void clear_schedule(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t ranks = config.slots.num_ranks;
  for (int32_t i = threadIdx.x; i < num_rings(ranks) * ranks; i += blockDim.x) {
    arrays.schedule[i] = kNoPair;
  }
}

// Barrier of the repairing warps alone: the others of the CTA do something else meanwhile.
__device__ inline void repair_barrier(int32_t num_warps) {
  if (num_warps == 1) {
    __syncwarp();
  } else {
    named_barrier(num_warps * 32);
  }
}

// W lanes a pair.
template <int W>
__device__ inline uint32_t lanes_of_pair() {
  return W == 32 ? kFullWarp : ((1u << (W & 31)) - 1) << (threadIdx.x % 32 / W * W);
}

// One lane's share of a pair: where the i-th broadcast of the first rank has its entries at the two
// ranks, in one word; the entry that stays 0 where they do not share it.
__device__ inline uint32_t pair_word(const PlanConfig& config, const PlanArrays& arrays,
                                     uint32_t pair, int32_t i) {
  const int32_t ranks = config.slots.num_ranks, a = pair & 0xff, c = pair >> 8;
  const uint32_t none = arrays.scalars[kEntries] * 0x10001u;
  if (i >= arrays.num_hosted[a]) return none;
  const Hosts hosts(Row{arrays.hosted[a * 2 * config.slots.num_helper_slots + i]}, ranks);
  return hosts.is_host(c) ? hosts.entry(a) | hosts.entry(c) << 16 : none;
}

template <int W>
__device__ void prepare_pairs(const PlanConfig& config, const PlanArrays& arrays,
                              int32_t num_pairs) {
  const int32_t words = min(num_pairs * W, kMaxPairWords);
  for (int32_t i = threadIdx.x; i < words; i += blockDim.x) {
    arrays.pair_words[i] = pair_word(config, arrays, arrays.pairs[i / W], i % W);
  }
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
  const int32_t amount =
      min(__shfl_sync(kFullWarp, takes, W - 1, W), __shfl_sync(kFullWarp, gives, W - 1, W));
  const int32_t taken = min(max(amount - (takes - take), 0), take);
  const int32_t given = min(max(amount - (gives - give), 0), give);
  lack_a -= taken - given;
  lack_c += taken - given;
}

// Both directions; true on lanes whose entries have changed. Most pairs want nothing of each other:
// where no broadcast has one of the two lacking and the other sparing, no pair of the warp trades.
template <int W>
__device__ inline bool trade_both(const PlanArrays& arrays, uint32_t word) {
  int32_t* at_a = arrays.lack + (word & 0xffff);
  int32_t* at_c = arrays.lack + (word >> 16);
  int32_t lack_a = *at_a, lack_c = *at_c;
  const bool is_uneven = (lack_a > 0 && lack_c < 0) || (lack_a < 0 && lack_c > 0);
  if (__ballot_sync(kFullWarp, is_uneven) == 0) return false;
  const int32_t before = lack_a;
  trade<W>(lack_a, lack_c);
  trade<W>(lack_c, lack_a);
  // Should the second direction undo the first, then nothing has changed.
  const bool is_changed = lack_a != before;
  if (is_changed) {
    *at_a = lack_a;
    *at_c = lack_c;
  }
  return is_changed;
}

// Two passes over the levels; W lanes for each rank that may be the first of a pair.
template <int W>
__device__ void repair(const PlanConfig& config, const PlanArrays& arrays, int32_t num_warps) {
  const int32_t ranks = config.slots.num_ranks, levels = arrays.scalars[kLevels];
  const int32_t own = threadIdx.x / W, i = threadIdx.x % W, stride = num_warps * (32 / W);
  const uint32_t none = arrays.scalars[kEntries] * 0x10001u;
  const auto word_at = [&](int32_t level, int32_t rank) {
    const uint32_t pair = rank < ranks ? arrays.schedule[level * ranks + rank] : kNoPair;
    if (pair == kNoPair) return none;
    const int32_t at = pair * W + i;
    return at < kMaxPairWords ? arrays.pair_words[at]
                              : pair_word(config, arrays, arrays.pairs[pair], i);
  };
  // A whole round without a trade would repeat itself: nothing is left to do.
  int32_t last_change = -1;
  uint32_t word = levels > 0 ? word_at(0, own) : none;
  for (int32_t step = 0; step < 2 * levels && step - last_change <= levels; ++step) {
    const int32_t level = step < levels ? step : step - levels;
    const uint32_t next = word_at(level + 1 < levels ? level + 1 : 0, own);
    bool changed = trade_both<W>(arrays, word);
    for (int32_t first = stride; first < ranks; first += stride) {
      changed |= trade_both<W>(arrays, word_at(level, own + first));
    }
    if (changed) arrays.scalars[kChangedA + (step & 1)] = step;
    repair_barrier(num_warps);
    if (arrays.scalars[kChangedA + (step & 1)] == step) last_change = step;
    word = next;
  }
}

// At most half of the CTA's warps repair; the others are free for what can run beside it.
__device__ inline int32_t num_repair_warps(const PlanConfig& config) {
  const int32_t lanes = config.slots.num_ranks * lanes_per_pair(config.slots.num_helper_slots);
  return min((lanes + 31) / 32, static_cast<int32_t>(blockDim.x) / 64);
}

__device__ inline void prepare_pairs(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t num_pairs = arrays.scalars[kPairs];
  switch (lanes_per_pair(config.slots.num_helper_slots)) {
    case 8:
      return prepare_pairs<8>(config, arrays, num_pairs);
    case 16:
      return prepare_pairs<16>(config, arrays, num_pairs);
    default:
      return prepare_pairs<32>(config, arrays, num_pairs);
  }
}

__device__ inline void level_pairs(const PlanConfig& config, const PlanArrays& arrays) {
  if (config.slots.num_ranks <= 32) return level_pairs<1>(config, arrays);
  return level_pairs<4>(config, arrays);
}

__device__ inline void repair(const PlanConfig& config, const PlanArrays& arrays) {
  const int32_t num_warps = num_repair_warps(config);
  switch (lanes_per_pair(config.slots.num_helper_slots)) {
    case 8:
      return repair<8>(config, arrays, num_warps);
    case 16:
      return repair<16>(config, arrays, num_warps);
    default:
      return repair<32>(config, arrays, num_warps);
  }
}

}  // namespace iser::cuda
