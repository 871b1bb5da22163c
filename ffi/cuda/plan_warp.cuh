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

}  // namespace iser::cuda
