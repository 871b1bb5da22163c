// HALO-Q stage 4 of dense plans on one warp, a rank a lane, without a barrier: pairs trade in
// waves, as soon as both ranks may, not ring by ring.
#pragma once

#include "ffi/cuda/plan_arrays.cuh"
#include "ffi/cuda/plan_warp.cuh"

namespace iser::cuda {

__device__ inline uint32_t shuffle(uint32_t value, int32_t lane) {
  return static_cast<uint32_t>(__shfl_sync(kFullWarp, static_cast<int32_t>(value), lane));
}
__device__ inline uint64_t shuffle(uint64_t value, int32_t lane) {
  const uint64_t high = shuffle(static_cast<uint32_t>(value >> 32), lane);
  return high << 32 | shuffle(static_cast<uint32_t>(value), lane);
}

__device__ inline int32_t count_bits(uint32_t bits) { return __popc(bits); }
__device__ inline int32_t count_bits(uint64_t bits) {
  return __popc(static_cast<uint32_t>(bits)) + __popc(static_cast<uint32_t>(bits >> 32));
}

template <typename Mask>
__device__ inline RankMasks<Mask> shuffle(const RankMasks<Mask>& own, int32_t lane) {
  return {shuffle(own.hosted, lane), shuffle(own.lacking, lane), shuffle(own.spare, lane)};
}

// Whether `own` lacks what the other can spare, and can spare something for it that both host.
template <typename Mask>
__device__ inline bool takes(const RankMasks<Mask>& own, const RankMasks<Mask>& other) {
  return (own.lacking & other.spare) != 0 && (own.spare & other.hosted) != 0;
}

// Ranks in the order in which their rings are sums, one a lane: at place i rank 2 i modulo the
// number of rings, and the last rank at its own. Those at i and k meet in ring i + k + 1 modulo
// that number; who would meet itself there meets the last.
struct RingPlaces {
  int32_t rings, place, rank;

  __device__ explicit RingPlaces(int32_t num_ranks)
      : rings(num_rings(num_ranks)),
        place(threadIdx.x % 32),
        rank(place < rings ? wrap(2 * place) : place) {}
  __device__ int32_t wrap(int32_t index) const { return index < rings ? index : index - rings; }
  __device__ int32_t partner(int32_t ring) const {
    if (place >= rings) return (ring - 1 + (ring % 2 == 0 ? rings : 0)) >> 1;
    const int32_t other = ring - 1 - place + (ring <= place ? rings : 0);
    return other == place ? rings : other;
  }
  __device__ bool is_first(int32_t ring) const {
    const int32_t index = rank - ring + (rank < ring ? rings : 0);
    return place == rings || index < rings / 2;
  }
  // Rings in which the lane's rank meets those at whose places `meets` holds, as it does for them.
  template <typename Meets>
  __device__ uint32_t where(Meets meets) const {
    uint32_t partners = 0;
#pragma unroll 4
    for (int32_t i = 0; i <= rings; ++i) partners |= meets(i) ? 1u << i : 0;
    const uint32_t all = (1u << rings) - 1, others = partners & all & ~(1u << place);
    const bool meets_last = place < rings && partners >> rings & 1;
    const uint32_t with_last = meets_last ? 1u << wrap(rank + 1) : 0;
    const uint32_t of_last = __reduce_or_sync(kFullWarp, with_last);
    if (place >= rings) return place == rings ? of_last : 0;
    return ((others << (place + 1) | others >> (rings - place - 1)) & all) | with_last;
  }
};

// haloq::trade of up to K broadcasts, where `trades`: `taker` takes.
template <int K>
__device__ inline void trade_rows(int32_t (&taker)[K], int32_t (&giver)[K], bool trades) {
  int32_t take[K], give[K], takes = 0, gives = 0;
#pragma unroll
  for (int k = 0; k < K; ++k) {
    take[k] = max(min(taker[k], -giver[k]), 0);
    give[k] = max(-taker[k], 0);
    takes += take[k];
    gives += give[k];
  }
  const int32_t amount = trades ? min(takes, gives) : 0;
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

// A pair of ranks of which the lane's is one; `first` comes first in its ring.
struct TradingPair {
  int32_t own, first, second;
  bool first_takes;  // else the second alone does
};

// Both directions of the pairs that trade something of `shared`, at most K broadcasts each; the
// lanes of both ranks work it out.
template <int K, typename Mask>
__device__ inline void trade_few(int32_t* lack, Mask shared, const TradingPair& pair,
                                 RankMasks<Mask>& own) {
  const int32_t takes = pair.first_takes ? pair.first : pair.second;
  const int32_t gives = pair.first_takes ? pair.second : pair.first;
  Mask bits[K];
  int32_t* rows[K];
  int32_t taker[K], giver[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    bits[k] = shared & (Mask{0} - shared);
    rows[k] = lack + 32 * lowest(shared);
    taker[k] = shared != 0 ? rows[k][takes] : 0;
    giver[k] = shared != 0 ? rows[k][gives] : 0;
    shared ^= bits[k];
  }
  __syncwarp();
  trade_rows(taker, giver, true);
  int32_t most = 0, least = 0;  // of what the giver can take now, and give
#pragma unroll
  for (int k = 0; k < K; ++k) {
    most = max(most, min(giver[k], -taker[k]));
    least = min(least, giver[k]);
  }
  const bool more = pair.first_takes && most > 0 && least < 0;
  if (__any_sync(kFullWarp, more)) trade_rows(giver, taker, more);
#pragma unroll
  for (int k = 0; k < K; ++k) {
    const int32_t value = takes == pair.own ? taker[k] : giver[k];
    if (bits[k] != 0) rows[k][pair.own] = value;
    own.lacking |= value > 0 ? bits[k] : 0;
    own.spare |= value < 0 ? bits[k] : 0;
  }
  __syncwarp();
}

// The same for any number.
template <typename Mask>
__device__ inline void trade_many(int32_t* lack, Mask shared, const TradingPair& pair,
                                  RankMasks<Mask>& own) {
  if (shared != 0 && pair.first == pair.own) {
    trade_shared(lack, shared, pair.first, pair.second);
    trade_shared(lack, shared, pair.second, pair.first);
  }
  __syncwarp();
#pragma unroll 1
  for (; shared != 0; shared &= shared - 1) {
    const Mask bit = shared & (Mask{0} - shared);
    const int32_t value = lack[32 * lowest(shared) + pair.own];
    own.lacking |= value > 0 ? bit : 0;
    own.spare |= value < 0 ? bit : 0;
  }
}

// haloq::repair. In the first pass a pair meets as soon as both of its ranks have met all whom they
// meet before; of the second pass only the rings in which a pair can trade are left. `by_rank`: a
// rank a lane.
template <typename Mask>
__device__ inline void repair_on_warp(const PlanConfig& config, const PlanArrays& arrays,
                                      const RankMasks<Mask>& by_rank) {
  constexpr int kFew = 4;
  const RingPlaces places(config.slots.num_ranks);
  auto own = shuffle(by_rank, places.rank);
  const uint32_t meetings = places.where([&](int32_t i) {  // others never trade
    const Mask shared = own.hosted & shuffle(own.hosted, i);
    return (shared & (shared - 1)) != 0;
  });
  uint32_t ahead = meetings, second_pass = kFullWarp;
  int32_t ring, partner;  // next; the lane's own place while the other has somebody to meet before
  const auto find_next = [&] {
    ring = lowest(ahead);
    const int32_t other = places.partner(ring);
    const bool meets = __shfl_sync(kFullWarp, ring, other) == ring && ahead != 0;
    partner = meets ? other : places.place;
    ahead &= meets ? ahead - 1 : ahead;
  };
  find_next();
  for (;;) {
    const int32_t now = ring, with = partner;
    const auto other = shuffle(own, with);
    find_next();
    const bool is_last = !__any_sync(kFullWarp, partner != places.place);
    const bool can_take = takes(own, other), can_give = takes(other, own);
    if (__any_sync(kFullWarp, can_take || can_give)) {
      const Mask relevant = own.hosted & other.hosted & (own.spare | other.spare);
      const Mask shared = can_take || can_give ? relevant : 0;
      const int32_t rank = places.rank, other_rank = __shfl_sync(kFullWarp, rank, with);
      const bool is_first = places.is_first(now);
      const TradingPair pair{rank, is_first ? rank : other_rank, is_first ? other_rank : rank,
                             is_first ? can_take : can_give};
      own.lacking &= ~shared;
      own.spare &= ~shared;
      if (__any_sync(kFullWarp, count_bits(shared) > kFew)) {
        trade_many(arrays.lack, shared, pair, own);
      } else {
        trade_few<kFew>(arrays.lack, shared, pair, own);
      }
    }
    if (!is_last) continue;
    const uint32_t can_trade = places.where([&](int32_t i) {
      const auto other = shuffle(own, i);
      return takes(own, other) || takes(other, own);
    });
    const uint32_t left = __reduce_or_sync(kFullWarp, can_trade) & second_pass;
    if (left == 0) break;
    second_pass = ~1u << lowest(left);
    ahead = meetings & left & (0u - left);
    find_next();
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
