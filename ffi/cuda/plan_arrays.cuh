// The plan of one CTA in shared memory.
#pragma once

#include "ffi/core/haloq.h"
#include "ffi/cuda/plan.cuh"

namespace iser::cuda {

constexpr unsigned kFullWarp = 0xffffffffu;

// The warp's index by way of lane 0: so the compiler knows that branches on it are the same for all
// lanes, and does not guard every warp operation behind them against divergence.
__device__ inline int32_t warp_index() {
  return __shfl_sync(kFullWarp, static_cast<int32_t>(threadIdx.x / 32), 0);
}

// Barrier of some of the CTA's threads, whole warps: the others do something else meanwhile.
__device__ inline void named_barrier(int32_t num_threads) {
#if defined(ISER_SIMT)
  simt::named_barrier(num_threads);
#else
  asm volatile("bar.sync 1, %0;" ::"r"(num_threads) : "memory");
#endif
}

// A broadcast in one word: where its entries start, its group and its owner. Its hosts are its
// entries, in rank order.
struct Row {
  uint32_t word;

  __device__ static Row make(int32_t start, int32_t begin, int32_t level, int32_t owner) {
    return {static_cast<uint32_t>(start | begin << 13 | level << 20 | owner << 23)};
  }
  __device__ int32_t start() const { return word & 0x1fff; }
  __device__ int32_t begin() const { return word >> 13 & 0x7f; }
  __device__ int32_t level() const { return word >> 20 & 0x7; }
  __device__ int32_t owner() const { return word >> 23 & 0x7f; }
};

// The hosts of a row, spelt out.
struct Hosts {
  int32_t start, begin, end, owner;

  __device__ Hosts(Row row, int32_t num_ranks)
      : start(row.start()),
        begin(row.begin()),
        end(row.begin() + (num_ranks >> row.level())),
        owner(row.owner()) {}
  __device__ bool contains(int32_t rank) const { return begin <= rank && rank < end; }
  __device__ bool is_host(int32_t rank) const { return contains(rank) || rank == owner; }
  __device__ int32_t count() const { return end - begin + !contains(owner); }
  __device__ int32_t entry(int32_t rank) const {
    if (contains(rank)) return start + (owner < begin) + rank - begin;
    return owner < begin ? start : start + end - begin;
  }
  __device__ int32_t rank_at(int32_t index) const {
    if (owner < begin) return index == 0 ? owner : begin + index - 1;
    return begin + index < end ? begin + index : owner;
  }
};

// A broadcast as one warp leaves it: `row` has the group's index over all levels for a start.
struct alignas(8) PlacedRow {
  uint32_t row;
  int32_t expert;
};

enum Scalar {
  kCount,
  kEntries,
  kTarget,
  kIsDense,
  kLevels,
  kPairs,
  kChangedA,
  kChangedB,
  kNumScalars = 8
};

constexpr int32_t kMaxNodes = 255;       // groups of all levels at 128 ranks
constexpr int32_t kMaxPairWords = 6144;  // of prepared pairs; further ones are looked up each time
constexpr uint16_t kNoPair = 0xffff;
constexpr int32_t kWarpRows = 64;  // broadcasts that one warp places and repairs

// Lanes for one pair of ranks: one for each broadcast that a rank may host.
ISER_HD inline int32_t lanes_per_pair(int32_t num_slots) {
  return num_slots <= 4 ? 8 : num_slots <= 8 ? 16 : 32;
}

// Words a rank in the copy of counts: an odd number, so that ranks' counts of an expert lie in
// different banks.
ISER_HD inline int32_t copy_stride(int32_t num_experts) { return num_experts | 1; }

// What would take divisions, from the host.
struct PlanSizes {
  int32_t num_home, num_levels;

  static PlanSizes of(const PlanConfig& config) {
    return {config.slots.num_home(),
            num_group_levels(config.slots.num_ranks, config.min_group_size)};
  }
};

struct PlanArrays {
  PlanSizes sizes;
  const int32_t* counts;  // [P, E], rows of count_stride, here or in the mail
  int32_t count_stride;
  uint64_t* hash;
  int32_t* scalars;
  int32_t* totals;            // [E]
  int32_t* load_before;       // [P]
  int32_t* load;              // [P]
  int32_t* candidate_expert;  // [P, S]
  int32_t* candidate_total;   // [P, S]
  int32_t* num_hosted;        // [P]
  uint32_t* hosted;           // [P, 2*S] rows that the rank hosts, in placement order. Of dense
                              // plans PlacedRow [B]
  uint32_t* hosts;            // [B/32, P] the same as bits
  uint32_t* rows;             // [B]
  int32_t* expert;            // [B]
  int32_t* node;              // [B] group over all levels, finest first
  int32_t* helper;            // [B] helper index; until it is known, the place within the node
  int32_t* lack;              // [entries] quota, then counts - quota; one more that stays 0. Of
                              // dense plans counts - quota, [B, 32]
  int32_t* node_count;        // broadcasts to exactly this group
  int32_t* node_foreign;      // whether one of them has its owner outside
  int32_t* widest;            // [P] the owner's widest broadcast into its own group
  uint32_t* can_trade;        // [rings/32, P] rings in which the rank's pair shares two broadcasts
  uint8_t* level;             // [rings, P] the level of the rank's pair in that ring
  uint16_t* schedule;         // [rings, P] pair by level and first rank, or kNoPair
  uint16_t* pairs;            // [rings * P/2] first rank | second rank << 8
  uint32_t* pair_words;       // entries of a pair's broadcasts at its two ranks

  __device__ int32_t count_of(int32_t rank, int32_t expert) const {
    return counts[rank * count_stride + expert];
  }
  __device__ PlacedRow* placed() const { return reinterpret_cast<PlacedRow*>(hosted); }
};

// What the host of a broadcast lacks of it.
__device__ inline int32_t lack_of(const PlanArrays& arrays, int32_t b, const Hosts& hosts,
                                  int32_t rank, bool is_dense) {
  return arrays.lack[is_dense ? 32 * b + rank : hosts.entry(rank)];
}

// The lowest of the bits, of which there is one.
__device__ inline int32_t lowest(uint32_t bits) { return 31 - __clz(bits & (0u - bits)); }
__device__ inline int32_t lowest(uint64_t bits) {
  const uint32_t low = static_cast<uint32_t>(bits);
  return low != 0 ? lowest(low) : 32 + lowest(static_cast<uint32_t>(bits >> 32));
}

// Hands out shared memory; with a null base it only counts.
struct Carver {
  uint8_t* base;
  size_t used;

  template <typename T>
  T* take(size_t count) {
    T* here = reinterpret_cast<T*>(base + used);
    used = align_up(used + sizeof(T) * count, 16);
    return here;
  }
};

ISER_HD inline int32_t num_rings(int32_t num_ranks) { return num_ranks + num_ranks % 2 - 1; }

ISER_HD inline int32_t max_pairs(int32_t num_ranks) {
  return num_rings(num_ranks) * ((num_ranks + 1) / 2);
}

inline void carve_plan(const PlanConfig& config, Carver& carver, PlanArrays& arrays) {
  const size_t ranks = config.slots.num_ranks, slots = config.slots.num_helper_slots;
  const size_t rows = ranks * slots;
  const size_t pair_words = static_cast<size_t>(max_pairs(ranks)) * lanes_per_pair(slots);
  arrays.sizes = PlanSizes::of(config);
  arrays.hash = carver.take<uint64_t>(1);
  arrays.scalars = carver.take<int32_t>(kNumScalars);
  arrays.totals = carver.take<int32_t>(config.slots.num_experts);
  arrays.load_before = carver.take<int32_t>(ranks);
  arrays.load = carver.take<int32_t>(ranks);
  arrays.candidate_expert = carver.take<int32_t>(rows);
  arrays.candidate_total = carver.take<int32_t>(rows);
  arrays.num_hosted = carver.take<int32_t>(ranks);
  arrays.hosted = carver.take<uint32_t>(2 * rows);
  arrays.hosts = carver.take<uint32_t>((rows + 31) / 32 * ranks);
  arrays.rows = carver.take<uint32_t>(rows);
  arrays.expert = carver.take<int32_t>(rows);
  arrays.node = carver.take<int32_t>(rows);
  arrays.helper = carver.take<int32_t>(rows);
  const size_t dense = ranks <= 32 ? 32 * (rows < kWarpRows ? rows : kWarpRows) : 0;
  arrays.lack = carver.take<int32_t>(2 * rows >= dense ? 2 * rows + 1 : dense);
  arrays.node_count = carver.take<int32_t>(kMaxNodes + 1);
  arrays.node_foreign = carver.take<int32_t>(kMaxNodes + 1);
  arrays.widest = carver.take<int32_t>(ranks);
  arrays.can_trade = carver.take<uint32_t>((num_rings(ranks) + 31) / 32 * ranks);
  arrays.level = carver.take<uint8_t>(num_rings(ranks) * ranks);
  arrays.schedule = carver.take<uint16_t>(num_rings(ranks) * ranks);
  arrays.pairs = carver.take<uint16_t>(max_pairs(ranks));
  arrays.pair_words =
      carver.take<uint32_t>(pair_words < kMaxPairWords ? pair_words : kMaxPairWords);
}

// Groups of all levels in one numbering, the finest level first, so that the first of equals is the
// one that HALO-Q prefers.
struct Nodes {
  int32_t num_ranks, levels;

  __device__ int32_t count() const { return (1 << levels) - 1; }
  __device__ int32_t level(int32_t node) const { return 31 - __clz(count() - node); }
  __device__ int32_t first(int32_t level) const { return (1 << levels) - (2 << level); }
  __device__ int32_t begin(int32_t node, int32_t level) const {
    return (node - first(level)) * (num_ranks >> level);
  }
};

}  // namespace iser::cuda
