// HALO-Q stages 2 and 4 on one warp, a rank a lane, without a barrier: for up to 32 ranks and as
// many broadcasts as fit in a mask. What a rank hosts, lacks and can spare are bits of its lane.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"

namespace iser::cuda {

constexpr int32_t kWarpLevels = 5;          // 31 groups, a group a lane too
constexpr uint32_t kWarpRoutes = 1u << 24;  // fewer fit in a key beside a level and a group

// Of the lane's rank, a bit a broadcast.
template <typename Mask>
struct RankMasks {
  Mask hosted, lacking, spare;
};

__device__ inline uint32_t shuffle(uint32_t value, int32_t lane) {
  return static_cast<uint32_t>(__shfl_sync(kFullWarp, static_cast<int32_t>(value), lane));
}
__device__ inline uint64_t shuffle(uint64_t value, int32_t lane) {
  const uint64_t high = shuffle(static_cast<uint32_t>(value >> 32), lane);
  return high << 32 | shuffle(static_cast<uint32_t>(value), lane);
}

// The group of the lane: of all levels in one numbering, the finest level first (Nodes).
struct LaneGroup {
  int32_t begin, size, level, group;
  uint32_t members;  // none where there is no such group
  int32_t room;      // full slots apart

  __device__ explicit LaneGroup(const Nodes& nodes) {
    const int32_t lane = threadIdx.x % 32, node = min(lane, nodes.count() - 1);
    level = nodes.level(node);
    group = node - nodes.first(level);
    size = nodes.num_ranks >> level;
    begin = group * size;
    members = lane == node ? (kFullWarp >> (32 - size)) << begin : 0;
  }

  __device__ void sum_rooms(int32_t rank_room, int32_t num_ranks) {
    const int32_t lane = threadIdx.x % 32;
    int32_t sum = rank_room;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      if (d >= num_ranks) break;
      const int32_t below = __shfl_up_sync(kFullWarp, sum, d);
      if (lane >= d) sum += below;
    }
    const int32_t last = __shfl_sync(kFullWarp, sum, begin + size - 1);
    const int32_t below = __shfl_sync(kFullWarp, sum, begin - 1);
    room = members ? last - (begin > 0 ? below : 0) : 0;
  }
};

// A group's keys, of which the largest wins: among all, and among those that take the whole amount.
// Of equals, the finer level and the lower index.
__device__ inline uint32_t key_by_room(int32_t room, const LaneGroup& own) {
  return room << 8 | own.level << 5 | (31 - own.group);
}
__device__ inline uint32_t key_by_level(int32_t room, const LaneGroup& own) {
  return (own.level + 1) << 29 | room << 5 | (31 - own.group);
}

// What comes before the lane's room where the coldest of the group are filled first. Of equals, the
// lower rank.
__device__ inline int32_t room_of_colder(int32_t room, int32_t begin, int32_t size) {
  const uint32_t own = room << 5 | (31 - threadIdx.x % 32);
  int32_t before = 0;
#pragma unroll 1
  for (int32_t i = 0; i < size; i += 4) {
    uint32_t other[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) other[k] = shuffle(own, begin + i + k);
#pragma unroll
    for (int k = 0; k < 4; ++k) before += i + k < size && other[k] > own ? other[k] >> 5 : 0;
  }
  return before;
}

// Stage 2, and what the ranks lack: counts - quota, [broadcasts, 32]. The plan stays not dense, and
// nothing of use written, where the warp's keys and masks do not do.
__device__ inline void place_on_warp(const PlanConfig& config, const PlanArrays& arrays,
                                     RankMasks<uint64_t>& masks) {
  const int32_t lane = threadIdx.x % 32, ranks = config.slots.num_ranks;
  const int32_t limit = config.slots.num_helper_slots;
  const int32_t exports = min(limit, arrays.sizes.num_home), levels = arrays.sizes.num_levels;
  const bool is_rank = lane < ranks;
  const int32_t load = is_rank ? arrays.load_before[lane] : 0;
  const uint32_t sum = __reduce_add_sync(kFullWarp, static_cast<uint32_t>(load));
  const uint32_t hottest = __reduce_max_sync(kFullWarp, static_cast<uint32_t>(load));
  if (sum >= kWarpRoutes || levels > kWarpLevels) return;
  const int32_t target = (sum + ranks - 1) / ranks;
  const bool gains = 1000ll * ranks * hottest >= static_cast<int64_t>(config.gain_threshold) * sum;
  bool is_active = is_rank && exports > 0 && gains;
  int32_t excess = is_rank ? load - target : 0;  // room where negative
  int32_t num_free = limit, next = lane * limit, last = next + exports - 1;
  int32_t expert = is_active ? arrays.candidate_expert[next] : 0;
  int32_t total = is_active ? arrays.candidate_total[next] : 0;
  const Nodes nodes{ranks, levels};
  LaneGroup own(nodes);

  RankMasks<uint32_t> low{},
      now{};  // of the first 32 broadcasts, once they are full; of the others
  int32_t count = 0, entries = 0, widest = INT32_MAX, num_placed = 0;
  bool is_foreign = false;  // whether one to the lane's group has its owner outside
  bool is_stale = true;     // rooms of groups
  for (;;) {
    if (is_stale) own.sum_rooms(max(-excess, 0), ranks);
    is_stale = false;
    const uint32_t full = __ballot_sync(kFullWarp, num_free == 0);
    const int32_t room = (full & own.members) == 0 ? own.room : 0;
    const uint32_t roomiest = __reduce_max_sync(kFullWarp, key_by_room(room, own));
    const uint32_t hot = __reduce_max_sync(
        kFullWarp, is_active && excess > 0 ? static_cast<uint32_t>(excess << 5 | (31 - lane)) : 0u);
    if (hot == 0) break;
    const int32_t owner = 31 - (hot & 31);
    const int32_t moving_total = __shfl_sync(kFullWarp, total, owner);
    const int32_t moving = __shfl_sync(kFullWarp, expert, owner);
    const int32_t amount = min(static_cast<int32_t>(hot >> 5), moving_total);
    const int32_t own_count = is_rank ? arrays.count_of(lane, moving) : 0;
    if (amount == 0) {
      is_active = is_active && lane != owner;
      continue;
    }

    // The roomiest group of the finest level that takes it all, else the roomiest of all.
    const uint32_t fit =
        __reduce_max_sync(kFullWarp, room >= amount ? key_by_level(room, own) : 0u);
    const bool fits = fit != 0;
    const int32_t most = fits ? fit >> 5 & 0xffffff : roomiest >> 8;
    if (most == 0) break;
    const int32_t level = fits ? (fit >> 29) - 1 : roomiest >> 5 & 7;
    const int32_t group = 31 - ((fits ? fit : roomiest) & 31);
    const int32_t size = ranks >> level, begin = group * size, moved_total = min(amount, most);
    const bool is_owner = lane == owner;

    // The candidate is consumed, also where the gain is too small.
    if (is_owner) {
      is_active = next < last;
      next += is_active;
      expert = arrays.candidate_expert[next];
      total = arrays.candidate_total[next];
    }
    if (moved_total < config.min_routes) continue;
    if (count == kWarpRows) return;
    if (count == 32) low = now, now = {};

    const int32_t own_room = max(-excess, 0);
    const int32_t before = most > amount ? room_of_colder(own_room, begin, size) : 0;
    const bool is_member = static_cast<uint32_t>(lane - begin) < static_cast<uint32_t>(size);
    const bool is_inside = static_cast<uint32_t>(owner - begin) < static_cast<uint32_t>(size);
    const int32_t moved = is_member ? min(max(amount - before, 0), own_room) : 0;
    const int32_t lack = own_count - (is_owner ? moving_total - moved_total : moved);
    const uint32_t bit = is_member || is_owner ? 1u << (count & 31) : 0;
    if (bit != 0) arrays.lack[count * 32 + lane] = lack;
    now.hosted |= bit;
    now.lacking |= lack > 0 ? bit : 0;
    now.spare |= lack < 0 ? bit : 0;
    excess += moved - (is_owner ? moved_total : 0);
    num_free -= is_member;
    if (is_owner && is_inside) widest = min(widest, level << 16 | count);
    if (own.members != 0 && own.begin == begin && own.level == level) {
      arrays.rows[count] = Row::make(entries, begin, level, owner).word;
      arrays.expert[count] = moving;
      arrays.node[count] = lane;
      arrays.helper[count] = num_placed++;
      is_foreign = is_foreign || !is_inside;
    }
    ++count;
    entries += size + !is_inside;

    // Groups around this one lose what was moved; those inside lose all or must be summed again.
    is_stale = most > amount && level + 1 < levels;
    if (own.level <= level) {
      if (own.members >> begin & 1) own.room -= moved_total;
    } else if (static_cast<uint32_t>(own.begin - begin) < static_cast<uint32_t>(size)) {
      own.room = 0;
    }
  }

  if (count <= 32) {
    masks = {now.hosted, now.lacking, now.spare};
  } else {
    const auto join = [](uint32_t high, uint32_t low) {
      return static_cast<uint64_t>(high) << 32 | low;
    };
    masks = {join(now.hosted, low.hosted), join(now.lacking, low.lacking),
             join(now.spare, low.spare)};
  }
  if (is_rank) {
    arrays.load[lane] = target + excess;
    arrays.widest[lane] = widest;
  }
  if (own.members != 0) {
    arrays.node_count[lane] = num_placed;
    arrays.node_foreign[lane] = is_foreign;
  }
  if (lane == 0) {
    arrays.scalars[kCount] = count;
    arrays.scalars[kEntries] = entries;
    arrays.scalars[kTarget] = target;
    arrays.scalars[kIsDense] = 1;
  }
  __syncwarp();
}

// haloq::trade of up to K broadcasts: `taker` takes.
template <int K>
__device__ inline void trade_rows(int32_t (&taker)[K], int32_t (&giver)[K]) {
  int32_t take[K], give[K], takes = 0, gives = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    take[k] = min(max(taker[k], 0), max(-giver[k], 0));
    give[k] = max(-taker[k], 0);
    takes += take[k];
    gives += give[k];
  }
  const int32_t amount = min(takes, gives);
  takes = gives = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int32_t taken = min(max(amount - takes, 0), take[k]);
    const int32_t given = min(max(amount - gives, 0), give[k]);
    takes += take[k];
    gives += give[k];
    taker[k] -= taken - given;
    giver[k] += taken - given;
  }
}

// The same for any number, by one thread.
template <typename Mask>
__device__ inline void trade_shared(int32_t* lack, Mask shared, int32_t taker, int32_t giver) {
  int32_t takes = 0, gives = 0;
#pragma unroll 1
  for (Mask left = shared; left != 0; left &= left - 1) {
    const int32_t* row = lack + 32 * lowest(left);
    takes += haloq::smaller(haloq::positive(row[taker]), haloq::positive(-row[giver]));
    gives += haloq::positive(-row[taker]);
  }
  takes = gives = min(takes, gives);
#pragma unroll 1
  for (Mask left = shared; left != 0; left &= left - 1) {
    int32_t* row = lack + 32 * lowest(left);
    const int32_t take = haloq::smaller(haloq::positive(row[taker]), haloq::positive(-row[giver]));
    const int32_t taken = min(take, takes), given = min(haloq::positive(-row[taker]), gives);
    takes -= taken;
    gives -= given;
    row[taker] -= taken - given;
    row[giver] += taken - given;
  }
}

// Both directions of the pairs that share something to trade: the lanes of a pair's ranks `first`
// and `second`, one of which is the lane's own, both work it out.
template <typename Mask>
__device__ inline void trade_pairs(int32_t* lack, Mask shared, int32_t first, int32_t second,
                                   RankMasks<Mask>& own) {
  constexpr int K = 4;
  const int32_t lane = threadIdx.x % 32;
  Mask low[K], left = shared;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    low[k] = left & (Mask{0} - left);
    left ^= low[k];
  }
  own.lacking &= ~shared;
  own.spare &= ~shared;
  if (__any_sync(kFullWarp, left != 0)) {  // more than K
    if (first == lane) {
      trade_shared(lack, shared, first, second);
      trade_shared(lack, shared, second, first);
    }
    __syncwarp();
#pragma unroll 1
    for (left = shared; left != 0; left &= left - 1) {
      const Mask bit = left & (Mask{0} - left);
      const int32_t value = lack[32 * lowest(bit) + lane];
      if (value > 0) own.lacking |= bit;
      if (value < 0) own.spare |= bit;
    }
    return;
  }
  int32_t of_first[K], of_second[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int32_t* row = lack + 32 * lowest(low[k]);
    of_first[k] = low[k] != 0 ? row[first] : 0;
    of_second[k] = low[k] != 0 ? row[second] : 0;
  }
  __syncwarp();
  trade_rows(of_first, of_second);
  trade_rows(of_second, of_first);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int32_t value = first == lane ? of_first[k] : of_second[k];
    if (low[k] == 0) continue;
    lack[32 * lowest(low[k]) + lane] = value;
    if (value > 0) own.lacking |= low[k];
    if (value < 0) own.spare |= low[k];
  }
  __syncwarp();
}

// Stage 4: haloq::repair, which looks for the next ring in which a pair trades, kBatch rings at a
// time. A pair trades where one rank lacks what the other spares and spares something else that
// both host. A whole round without a trade would repeat itself: nothing is left to do.
template <typename Mask>
__device__ void repair_on_warp(const PlanConfig& config, const PlanArrays& arrays,
                               RankMasks<Mask> own) {
  constexpr int kBatch = 4;
  const int32_t lane = threadIdx.x % 32, rings = num_rings(config.slots.num_ranks);
  const auto wrap = [rings](int32_t index) { return index < rings ? index : index - rings; };
  const bool is_last = lane == rings;
  // The partner at the batch's first ring, and at the next ones: from ring to ring the last rank's
  // moves by one, every other's by two. Who would meet itself meets the last.
  int32_t partner = is_last ? rings - 1 : lane > rings ? 0 : rings - 2 - lane;
  if (partner < 0) partner += rings;
  int32_t moved[kBatch + 1] = {};
#pragma unroll
  for (int i = 1; i <= kBatch; ++i) {
    moved[i] = wrap(moved[i - 1] + 1);
    if (!is_last) moved[i] = wrap(moved[i] + 1);
  }
  int32_t ring = 0, first_open = 0, end = rings;
  for (int32_t step = 0; step < end;) {
    int32_t with = 0, at = kBatch;
    Mask shared = 0;
#pragma unroll
    for (int i = kBatch - 1; i >= 0; --i) {
      int32_t other = wrap(partner + moved[i]);
      if (other == lane) other = rings;
      const Mask hosted = shuffle(own.hosted, other), lacking = shuffle(own.lacking, other);
      const Mask spare = shuffle(own.spare, other);
      const bool takes = (own.lacking & spare) != 0 && (own.spare & hosted) != 0;
      const bool gives = (own.spare & lacking) != 0 && (spare & own.hosted) != 0;
      const bool trades = (takes || gives) && i >= first_open && step + i < end;
      if (!__any_sync(kFullWarp, trades)) continue;
      at = i;
      with = other;
      shared = trades ? own.hosted & hosted : 0;
    }
    if (at < kBatch) {
      int32_t index = ring + at;
      while (index >= rings) index -= rings;
      index = lane - index + 1;
      if (index <= 0) index += rings;
      const bool is_first = is_last || index <= rings / 2;
      trade_pairs(arrays.lack, shared, is_first ? lane : with, is_first ? with : lane, own);
      end = min(2 * rings, step + at + rings + 1);
      first_open = at + 1;
      if (first_open < kBatch) continue;
    }
    step += kBatch;
    ring += kBatch;
    while (ring >= rings) ring -= rings;
    partner = wrap(partner + moved[kBatch]);
    first_open = 0;
  }
}

__device__ inline void repair_on_warp(const PlanConfig& config, const PlanArrays& arrays,
                                      const RankMasks<uint64_t>& masks) {
  const int32_t count = arrays.scalars[kCount];
  if (count == 0) return;
  if (count > 32) return repair_on_warp<uint64_t>(config, arrays, masks);
  repair_on_warp<uint32_t>(
      config, arrays,
      {static_cast<uint32_t>(masks.hosted), static_cast<uint32_t>(masks.lacking),
       static_cast<uint32_t>(masks.spare)});
}

}  // namespace iser::cuda
