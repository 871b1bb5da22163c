// What HALO-Q is asked and what it answers: plain structures over the caller's memory.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/expert.h"
#include "ffi/core/groups.h"

namespace iser {

enum class CopyRule : int32_t { kPerSlot = 0, kOwnerDirect = 1, kSami = 2 };
enum class CopyWay : int32_t { kOwnerDirect = 0, kSami = 1, kResident = 2 };

struct PlanConfig {
  SlotSpace slots;
  int32_t min_group_size;
  int32_t min_routes;
  int32_t gain_threshold;  // thousandths
  CopyRule copy_rule;

  ISER_HD int32_t max_broadcasts() const { return slots.num_ranks * slots.num_helper_slots; }
};

// One row of the plan's broadcast table; the order of fields is the order of its columns.
struct Broadcast {
  int32_t expert;
  int32_t owner;
  int32_t level;
  int32_t group_idx;
  int32_t helper_idx;
  int32_t how;  // CopyWay

  ISER_HD Group group(int32_t num_ranks) const {
    return aligned_group(num_ranks, level, group_idx);
  }
};

// The plan's arrays; `quota` is [max_broadcasts, num_ranks].
struct PlanView {
  Broadcast* broadcasts;
  int32_t* quota;
  int32_t* load_before;
  int32_t* load;
  int32_t* num_broadcasts;
  int32_t* target;
};

// Scratch of one planner. Hosted lists hold at most 2*S broadcasts a rank: S received, S exported.
struct PlanScratch {
  int64_t* loads;           // [num_ranks]
  int32_t* totals;          // [num_experts]; the routes of a call number less than 2^31
  int32_t* free_slots;      // [num_ranks]
  int32_t* next_export;     // [num_ranks], -1 when frozen
  int32_t* candidates;      // [num_ranks, num_helper_slots]
  int32_t* num_candidates;  // [num_ranks], -1 until chosen
  int32_t* order;           // [num_ranks], members of a group, coldest first
  int32_t* hosted;          // [num_ranks, 2*num_helper_slots]
  int32_t* num_hosted;      // [num_ranks]
};

ISER_HD inline size_t plan_scratch_bytes(const PlanConfig& config) {
  const size_t ranks = config.slots.num_ranks, slots = config.slots.num_helper_slots;
  return sizeof(int64_t) * ranks +
         sizeof(int32_t) * (config.slots.num_experts + ranks * (5 + 3 * slots));
}

// Carves the scratch out of `bytes` (8-byte aligned, plan_scratch_bytes long).
ISER_HD inline PlanScratch plan_scratch(const PlanConfig& config, void* bytes) {
  const size_t ranks = config.slots.num_ranks, slots = config.slots.num_helper_slots;
  PlanScratch s;
  s.loads = static_cast<int64_t*>(bytes);
  s.totals = reinterpret_cast<int32_t*>(s.loads + ranks);
  s.free_slots = s.totals + config.slots.num_experts;
  s.next_export = s.free_slots + ranks;
  s.num_candidates = s.next_export + ranks;
  s.order = s.num_candidates + ranks;
  s.num_hosted = s.order + ranks;
  s.candidates = s.num_hosted + ranks;
  s.hosted = s.candidates + ranks * slots;
  return s;
}

}  // namespace iser
