// HALO-Q: which hot experts are copied where, and who computes how much of them.
//
// The five stages of the paper's Algorithm 1 as functions over plain arrays, shared by host and
// device. All arithmetic is on integers and every tie is broken by an index, so every rank derives
// the same plan from the same counts. jax_iser/reference/planner.py is the twin that defines each
// stage; the two agree bit for bit.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/haloq_place.h"
#include "ffi/core/haloq_repair.h"
#include "ffi/core/haloq_types.h"

namespace iser {

namespace haloq {

// Whether every broadcast that meets this one's group targets exactly it, with its owner inside.
ISER_HD inline bool is_pure(const PlanConfig& config, const PlanView& plan, int32_t count,
                            Group group) {
  for (int32_t b = 0; b < count; ++b) {
    const Group other = plan.broadcasts[b].group(config.slots.num_ranks);
    if (!other.meets(group)) continue;
    if (!(other == group) || !group.contains(plan.broadcasts[b].owner)) return false;
  }
  return true;
}

// Whether no other broadcast of the owner into a group with it is wider, or as wide and earlier.
ISER_HD inline bool is_widest(const PlanConfig& config, const PlanView& plan, int32_t count,
                              int32_t index) {
  const Broadcast& row = plan.broadcasts[index];
  for (int32_t b = 0; b < count; ++b) {
    const Broadcast& other = plan.broadcasts[b];
    if (other.owner != row.owner || !other.group(config.slots.num_ranks).contains(row.owner)) {
      continue;
    }
    if (other.level < row.level || (other.level == row.level && b < index)) return false;
  }
  return true;
}

// How the broadcast is copied (paper section 4.3). `resident` is the slot table [num_ranks, S] of
// the previous call, or null.
ISER_HD inline CopyWay copy_way(const PlanConfig& config, const PlanView& plan, int32_t count,
                                int32_t index, const int32_t* resident) {
  const Broadcast& row = plan.broadcasts[index];
  const Group group = row.group(config.slots.num_ranks);
  bool held = resident != nullptr;
  for (int32_t r = group.begin; held && r < group.end; ++r) {
    held = resident[static_cast<size_t>(r) * config.slots.num_helper_slots + row.helper_idx] ==
           row.expert;
  }
  if (held) return CopyWay::kResident;
  if (config.copy_rule == CopyRule::kOwnerDirect) return CopyWay::kOwnerDirect;
  if (config.copy_rule == CopyRule::kSami || !group.contains(row.owner)) return CopyWay::kSami;
  return is_pure(config, plan, count, group) || is_widest(config, plan, count, index)
             ? CopyWay::kOwnerDirect
             : CopyWay::kSami;
}

}  // namespace haloq

// Stages 2 to 4 on the all-gathered counts [num_ranks, num_experts]; every field of `plan` is
// written, unused broadcast rows as -1 with zero quota.
ISER_HD inline void plan_counts(const PlanConfig& config, const int32_t* counts,
                                const int32_t* resident, const PlanScratch& scratch,
                                const PlanView& plan) {
  const SlotSpace& slots = config.slots;
  const int64_t total = haloq::sum_loads(config, counts, scratch);
  const int64_t target = (total + slots.num_ranks - 1) / slots.num_ranks;
  int64_t max_load = 0;
  for (int32_t r = 0; r < slots.num_ranks; ++r) {
    plan.load_before[r] = static_cast<int32_t>(scratch.loads[r]);
    if (scratch.loads[r] > max_load) max_load = scratch.loads[r];
  }
  const bool gains = 1000 * slots.num_ranks * max_load >= config.gain_threshold * total;
  const int32_t count =
      slots.num_helper_slots > 0 && gains ? haloq::place(config, scratch, target, plan) : 0;
  haloq::color_slots(config, plan, count);
  haloq::repair(config, scratch, counts, plan, count);
  for (int32_t b = 0; b < count; ++b) {
    plan.broadcasts[b].how =
        static_cast<int32_t>(haloq::copy_way(config, plan, count, b, resident));
  }
  for (int32_t b = count; b < config.max_broadcasts(); ++b) {
    plan.broadcasts[b] = {-1, -1, -1, -1, -1, -1};
    for (int32_t r = 0; r < slots.num_ranks; ++r) {
      plan.quota[static_cast<size_t>(b) * slots.num_ranks + r] = 0;
    }
  }
  for (int32_t r = 0; r < slots.num_ranks; ++r) {
    plan.load[r] = static_cast<int32_t>(scratch.loads[r]);
  }
  *plan.num_broadcasts = count;
  *plan.target = static_cast<int32_t>(target);
}

// Stage 5 as counts: share[h] of the broadcast's routes that `source` sends to host h. Its first
// kept routes stay; its surplus fills the hosts' spare quota after that of the ranks before it.
ISER_HD inline void source_share(const PlanConfig& config, const int32_t* counts, int32_t expert,
                                 const int32_t* quota, int32_t source, int32_t* share) {
  const int32_t num_ranks = config.slots.num_ranks;
  const auto count_of = [&](int32_t r) {
    return counts[static_cast<size_t>(r) * config.slots.num_experts + expert];
  };
  int64_t begin = 0;
  for (int32_t r = 0; r < source; ++r) begin += haloq::positive(count_of(r) - quota[r]);
  const int64_t end = begin + haloq::positive(count_of(source) - quota[source]);
  int64_t open = 0;
  for (int32_t h = 0; h < num_ranks; ++h) {
    const int64_t close = open + haloq::positive(quota[h] - count_of(h));
    const int64_t from = open > begin ? open : begin, to = close < end ? close : end;
    share[h] = to > from ? static_cast<int32_t>(to - from) : 0;
    open = close;
  }
  share[source] += haloq::smaller(count_of(source), quota[source]);
}

// One term of the plan's hash: `value` at `place`, mixed by the finaliser of splitmix64.
ISER_HD inline uint64_t hash_term(uint32_t place, int32_t value) {
  uint64_t z =
      (static_cast<uint64_t>(place) << 32 | static_cast<uint32_t>(value)) + 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

// What broadcast `index` adds to the hash; a quota of `value` routes at `host` adds quota_term.
ISER_HD inline uint64_t broadcast_terms(const PlanConfig& config, const Broadcast& row,
                                        int32_t index) {
  const uint32_t place = 1 + index * (config.slots.num_ranks + 5);
  return hash_term(place, row.expert) + hash_term(place + 1, row.level) +
         hash_term(place + 2, row.group_idx) + hash_term(place + 3, row.helper_idx) +
         hash_term(place + 4, row.how);
}

ISER_HD inline uint64_t quota_term(const PlanConfig& config, int32_t index, int32_t host,
                                   int32_t value) {
  if (value == 0) return 0;
  return hash_term(1 + index * (config.slots.num_ranks + 5) + 5 + host, value);
}

// Over the broadcasts and quotas in use: equal plans have equal hashes. A sum, so that threads may
// add their terms in any order.
ISER_HD inline uint64_t plan_hash(const PlanConfig& config, const PlanView& plan) {
  uint64_t hash = hash_term(0, *plan.num_broadcasts);
  for (int32_t b = 0; b < *plan.num_broadcasts; ++b) {
    hash += broadcast_terms(config, plan.broadcasts[b], b);
    for (int32_t r = 0; r < config.slots.num_ranks; ++r) {
      hash +=
          quota_term(config, b, r, plan.quota[static_cast<size_t>(b) * config.slots.num_ranks + r]);
    }
  }
  return hash;
}

}  // namespace iser
