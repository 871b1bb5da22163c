// HALO-Q stage 2 for up to 32 ranks and as many broadcasts as fit in a mask: one warp places, a
// rank a lane, without a barrier, and leaves to all warps what need not be known while it does.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"

namespace iser::cuda {

constexpr int32_t kWarpLevels = 5;          // 31 groups, a group a lane too
constexpr uint32_t kWarpRoutes = 1u << 24;  // fewer fit in a key beside a level and a group

// What a rank hosts, lacks and can spare, a bit a broadcast.
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
  int32_t room;      // 0 where a member's slots are full
  bool is_open;      // whether none are

  __device__ explicit LaneGroup(const Nodes& nodes) {
    const int32_t lane = threadIdx.x % 32, node = min(lane, nodes.count() - 1);
    level = nodes.level(node);
    group = node - nodes.first(level);
    size = nodes.num_ranks >> level;
    begin = group * size;
    members = lane == node ? (kFullWarp >> (32 - size)) << begin : 0;
    is_open = members != 0;
    room = 0;
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
    room = is_open ? last - (begin > 0 ? below : 0) : 0;
  }
};

// What comes before the lane's room where the coldest of the group are filled first. Of equals, the
// lower rank.
struct ColdOrder {
  uint32_t key;

  // Keys of four add up without their ranks reaching the rooms.
  __device__ explicit ColdOrder(int32_t room) : key(room << 7 | (31 - threadIdx.x % 32)) {}
  __device__ int32_t before(const int32_t (&ranks)[4]) const {
    uint32_t other[4], sum = 0;
#pragma unroll
    for (int k = 0; k < 4; ++k) other[k] = __shfl_sync(kFullWarp, key, ranks[k]);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum += other[k] > key ? other[k] : 0;
    return sum >> 7;
  }
};

// Of a group of any size.
__device__ inline int32_t room_of_colder(int32_t room, bool is_member, int32_t begin,
                                         int32_t size) {
  const ColdOrder order(is_member ? room : 0);
  int32_t sum = 0;
#pragma unroll 1
  for (int32_t i = begin; i < begin + size; i += 4) sum += order.before({i, i + 1, i + 2, i + 3});
  return sum;
}

// Stage 2 but for what finish_rows adds, and what ranks lack: counts - quota, [broadcasts, 32]. The
// plan stays not dense, and nothing of use written, where the warp's keys and masks do not do.
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
  const bool is_exporter = is_rank && exports > 0 && gains;
  int32_t excess = is_rank ? load - target : 0;  // room where negative
  int32_t num_free = limit, num_left = is_exporter ? exports : 0;
  int32_t next = is_exporter ? lane * limit : 0;
  const int32_t last = next + max(num_left - 1, 0);
  int32_t expert = is_exporter ? arrays.candidate_expert[next] : 0;
  int32_t total = is_exporter ? arrays.candidate_total[next] : 0;
  const Nodes nodes{ranks, levels};
  LaneGroup own(nodes);
  const uint32_t own_row = Row::make(lane, own.begin, own.level, 0).word;
  PlacedRow* const placed = arrays.placed();
  const int32_t num_finest = 1 << (levels - 1), finest = ranks >> (levels - 1);
  const uint32_t begins = __reduce_or_sync(kFullWarp, lane < num_finest ? 1u << own.begin : 0u);
  const int32_t near_begin = 31 - __clz(begins & ((2u << lane) - 1));
  int32_t near[4];  // the lane's group of the finest level, where it is as small
#pragma unroll
  for (int k = 0; k < 4; ++k) near[k] = k < finest ? near_begin + k : lane;
  const int32_t least = max(config.min_routes, 1);
  const int32_t* const counts = arrays.counts + min(lane, ranks - 1) * arrays.count_stride;

  masks = {};
  int32_t count = 0, widest = INT32_MAX;
  own.sum_rooms(max(-excess, 0), ranks);
  for (;;) {
    const bool is_hot = num_left > 0 && excess > 0;
    const uint32_t hot = __reduce_max_sync(
        kFullWarp, is_hot ? static_cast<uint32_t>(excess << 5 | (31 - lane)) : 0u);
    if (hot == 0) break;
    const int32_t owner = 31 - (hot & 31);
    const int32_t moving = __shfl_sync(kFullWarp, expert, owner);
    const int32_t moving_total = __shfl_sync(kFullWarp, total, owner);
    const int32_t rank_room = max(-excess, 0);
    const int32_t before_near = ColdOrder(rank_room).before(near);
    // Of equals, the finer level and the lower index.
    const uint32_t key = own.room << 5 | (31 - lane);
    const uint32_t roomiest = __reduce_max_sync(kFullWarp, key);
    const int32_t amount = min(static_cast<int32_t>(hot >> 5), moving_total);

    // The roomiest group of the finest level that takes it all, else the roomiest of all.
    const uint32_t fit =
        __reduce_max_sync(kFullWarp, own.room >= amount ? key | (own.level + 1) << 29 : 0u);
    const uint32_t best = fit != 0 ? fit & 0x1fffffff : roomiest;
    const int32_t most = best >> 5, node = 31 - (best & 31);
    const int32_t moved_total = min(amount, most);
    const bool is_owner = lane == owner;
    const uint32_t members = __shfl_sync(kFullWarp, own.members, node);
    const uint32_t row = __shfl_sync(kFullWarp, own_row, node);
    const int32_t own_count = counts[moving];
    // The candidate is consumed, also where the gain is too small.
    num_left -= is_owner;
    next = min(next + is_owner, last);
    if (is_exporter) {
      expert = arrays.candidate_expert[next];
      total = arrays.candidate_total[next];
    }
    if (moved_total < least) {
      if (amount == 0) {
        if (is_owner) num_left = 0;
        continue;
      }
      if (most == 0) break;
      continue;
    }
    if (count == kWarpRows) return;

    const bool is_member = members >> lane & 1;
    int32_t before = before_near;
    if (node >= num_finest || finest > 4) {
      before = room_of_colder(rank_room, is_member, Row{row}.begin(), ranks >> Row{row}.level());
    }
    const int32_t moved = is_member ? min(max(amount - before, 0), rank_room) : 0;
    const int32_t lack = own_count - (is_owner ? moving_total - moved_total : moved);
    const uint64_t bit = is_member || is_owner ? uint64_t{1} << count : 0;
    masks.hosted |= bit;
    masks.lacking |= lack > 0 ? bit : 0;
    masks.spare |= lack < 0 ? bit : 0;
    arrays.lack[count * 32 + lane] = lack;
    if (is_owner && is_member) widest = min(widest, Row{row}.level() << 16 | count);
    if (lane == 0) placed[count] = {row | owner << 23, moving};
    ++count;
    excess += is_owner ? -moved_total : moved;
    num_free -= is_member;
    const uint32_t full = __ballot_sync(kFullWarp, num_free == 0);
    own.is_open = own.is_open && (full & own.members) == 0;

    // Groups around this one lose what was moved; those inside lose all or are summed again.
    if (node >= num_finest && most > amount) {
      own.sum_rooms(max(-excess, 0), ranks);
    } else {
      const bool is_around = (members & ~own.members) == 0;
      own.room = is_around ? own.room - moved_total : (members & own.members) == 0 ? own.room : 0;
      own.room = own.is_open ? own.room : 0;
    }
  }

  if (is_rank) {
    arrays.load[lane] = target + excess;
    arrays.widest[lane] = widest;
  }
  if (lane == 0) {
    arrays.scalars[kCount] = count;
    arrays.scalars[kTarget] = target;
    arrays.scalars[kIsDense] = 1;
  }
  __syncwarp();
}

// After place_on_warp, where rows' entries start, their places within their groups, and what groups
// have: a warp a row or a group. Warps from the one of thread `first_thread` on.
__device__ inline void finish_rows(const PlanConfig& config, const PlanArrays& arrays,
                                   int32_t first_thread) {
  const int32_t ranks = config.slots.num_ranks, count = arrays.scalars[kCount];
  const int32_t lane = threadIdx.x % 32, num_warps = (blockDim.x - first_thread) / 32;
  const int32_t num_nodes = Nodes{ranks, arrays.sizes.num_levels}.count();
  const PlacedRow* const placed = arrays.placed();
  int32_t node[2], entries[2];  // of the lane's rows
  bool is_foreign[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t b = 32 * i + lane;
    const Row row{placed[min(b, max(count - 1, 0))].row};
    const Hosts hosts(row, ranks);
    node[i] = b < count ? row.start() : -1;
    entries[i] = b < count ? hosts.count() : 0;
    is_foreign[i] = !hosts.contains(hosts.owner);
  }
#pragma unroll 1
  for (int32_t at = warp_index() - first_thread / 32; at <= count; at += num_warps) {
    const PlacedRow row = at < count ? placed[at] : PlacedRow{};
    const int32_t own = Row{row.row}.start();
    int32_t start = 0, helper = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool is_before = 32 * i + lane < at;
      start += is_before ? entries[i] : 0;
      helper += __popc(__ballot_sync(kFullWarp, is_before && node[i] == own));
    }
    start = __reduce_add_sync(kFullWarp, start);
    if (lane == 0 && at < count) {
      arrays.rows[at] = row.row - own + start;
      arrays.expert[at] = row.expert;
      arrays.node[at] = own;
      arrays.helper[at] = helper;
    }
    if (lane == 0 && at == count) arrays.scalars[kEntries] = start;
  }
#pragma unroll 1
  for (int32_t n = warp_index() - first_thread / 32; n < num_nodes; n += num_warps) {
    int32_t num_placed = 0;
    bool has_foreign = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      num_placed += __popc(__ballot_sync(kFullWarp, node[i] == n));
      has_foreign = has_foreign || (node[i] == n && is_foreign[i]);
    }
    has_foreign = __any_sync(kFullWarp, has_foreign);
    if (lane == 0) {
      arrays.node_count[n] = num_placed;
      arrays.node_foreign[n] = has_foreign;
    }
  }
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
