// HALO-Q's stages 2 and 3: candidates, groups, and the helper slots that they take.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/haloq_types.h"

namespace iser::haloq {

// Sums the counts [num_ranks, num_experts] by expert and by owner; returns the grand total.
ISER_HD inline int64_t sum_loads(const PlanConfig& config, const int32_t* counts,
                                 const PlanScratch& scratch) {
  const SlotSpace& slots = config.slots;
  int32_t* totals = scratch.totals;
  for (int32_t e = 0; e < slots.num_experts; ++e) totals[e] = counts[e];
  for (int32_t r = 1; r < slots.num_ranks; ++r) {
    const int32_t* row = counts + static_cast<size_t>(r) * slots.num_experts;
    for (int32_t e = 0; e < slots.num_experts; ++e) totals[e] += row[e];
  }
  int64_t total = 0;
  for (int32_t r = 0; r < slots.num_ranks; ++r) {
    int64_t load = 0;
    for (int32_t h = 0; h < slots.num_home(); ++h) load += totals[r * slots.num_home() + h];
    scratch.loads[r] = load;
    total += load;
  }
  return total;
}

// Fills the owner's candidate list: its min(S, H) heaviest home experts, ties to the lower id.
ISER_HD inline void choose_candidates(const PlanConfig& config, const PlanScratch& scratch,
                                      int32_t owner) {
  const SlotSpace& slots = config.slots;
  const int32_t home = slots.num_home(), limit = slots.num_helper_slots;
  int32_t* list = scratch.candidates + static_cast<size_t>(owner) * limit;
  int32_t count = 0;
  for (int32_t e = owner * home; e < (owner + 1) * home; ++e) {
    int32_t at = count;
    while (at > 0 && scratch.totals[list[at - 1]] < scratch.totals[e]) --at;
    if (at >= limit) continue;
    if (count < limit) ++count;
    for (int32_t i = count - 1; i > at; --i) list[i] = list[i - 1];
    list[at] = e;
  }
  scratch.num_candidates[owner] = count;
}

ISER_HD inline int64_t room_below(const int64_t* loads, Group group, int32_t owner,
                                  int64_t target) {
  int64_t room = 0;
  for (int32_t r = group.begin; r < group.end; ++r) {
    if (r != owner && loads[r] < target) room += target - loads[r];
  }
  return room;
}

ISER_HD inline bool all_free(const int32_t* free_slots, Group group) {
  for (int32_t r = group.begin; r < group.end; ++r) {
    if (free_slots[r] == 0) return false;
  }
  return true;
}

struct GroupChoice {
  int64_t room;
  int32_t level;
  int32_t group_idx;
};

// The roomiest group of one level whose members all have a free slot; ties to the lower index.
ISER_HD inline GroupChoice roomiest(const PlanConfig& config, const PlanScratch& scratch,
                                    int32_t level, int32_t owner, int64_t target) {
  GroupChoice best{0, level, -1};
  for (int32_t g = 0; g < (1 << level); ++g) {
    const Group group = aligned_group(config.slots.num_ranks, level, g);
    if (!all_free(scratch.free_slots, group)) continue;
    const int64_t room = room_below(scratch.loads, group, owner, target);
    if (room > best.room) best = {room, level, g};
  }
  return best;
}

// The finest level that takes all of `amount`, else the most room seen (ties: the finer level).
ISER_HD inline GroupChoice choose_group(const PlanConfig& config, const PlanScratch& scratch,
                                        int32_t owner, int64_t amount, int64_t target) {
  GroupChoice best{0, -1, -1};
  const int32_t levels = num_group_levels(config.slots.num_ranks, config.min_group_size);
  for (int32_t level = levels - 1; level >= 0; --level) {
    const GroupChoice choice = roomiest(config, scratch, level, owner, target);
    if (choice.group_idx >= 0 && choice.room >= amount) return choice;
    if (choice.room > best.room) best = choice;
  }
  return best;
}

// Members of the group other than the owner, coldest first, ties to the lower rank.
ISER_HD inline int32_t sort_coldest(const int64_t* loads, Group group, int32_t owner,
                                    int32_t* order) {
  int32_t count = 0;
  for (int32_t r = group.begin; r < group.end; ++r) {
    if (r == owner) continue;
    int32_t at = count++;
    for (; at > 0 && loads[order[at - 1]] > loads[r]; --at) order[at] = order[at - 1];
    order[at] = r;
  }
  return count;
}

// Moves up to `amount` routes of the expert from its owner to the group, and takes the slots.
ISER_HD inline void commit(const PlanConfig& config, const PlanScratch& scratch, Group group,
                           int32_t expert, int32_t owner, int64_t amount, int64_t target,
                           int32_t* quota) {
  for (int32_t r = 0; r < config.slots.num_ranks; ++r) quota[r] = 0;
  const int32_t members = sort_coldest(scratch.loads, group, owner, scratch.order);
  int64_t left = amount;
  for (int32_t i = 0; i < members && left > 0; ++i) {
    const int32_t r = scratch.order[i];
    int64_t moved = target - scratch.loads[r];
    if (moved <= 0) break;  // the rest is warmer still
    if (moved > left) moved = left;
    quota[r] = static_cast<int32_t>(moved);
    scratch.loads[r] += moved;
    left -= moved;
  }
  scratch.loads[owner] -= amount - left;
  quota[owner] = static_cast<int32_t>(scratch.totals[expert] - (amount - left));
  for (int32_t r = group.begin; r < group.end; ++r) --scratch.free_slots[r];
}

ISER_HD inline int32_t hottest_exporter(const PlanConfig& config, const PlanScratch& scratch,
                                        int64_t target) {
  int32_t hottest = -1;
  int64_t load = target;
  for (int32_t r = 0; r < config.slots.num_ranks; ++r) {
    if (scratch.next_export[r] >= 0 && scratch.loads[r] > load) {
      hottest = r;
      load = scratch.loads[r];
    }
  }
  return hottest;
}

// Stage 2. Returns the number of broadcasts; helper_idx and how are filled in later.
ISER_HD inline int32_t place(const PlanConfig& config, const PlanScratch& scratch, int64_t target,
                             const PlanView& plan) {
  const SlotSpace& slots = config.slots;
  for (int32_t r = 0; r < slots.num_ranks; ++r) {
    scratch.free_slots[r] = slots.num_helper_slots;
    scratch.next_export[r] = 0;
    scratch.num_candidates[r] = -1;
  }
  int32_t count = 0;
  for (;;) {
    const int32_t owner = hottest_exporter(config, scratch, target);
    if (owner < 0) return count;
    if (scratch.num_candidates[owner] < 0) choose_candidates(config, scratch, owner);
    int32_t& next = scratch.next_export[owner];
    if (next == scratch.num_candidates[owner]) {
      next = -1;
      continue;
    }
    const int32_t expert =
        scratch.candidates[static_cast<size_t>(owner) * slots.num_helper_slots + next++];
    int64_t amount = scratch.loads[owner] - target;
    if (amount > scratch.totals[expert]) amount = scratch.totals[expert];
    const GroupChoice choice = choose_group(config, scratch, owner, amount, target);
    if (amount == 0 || choice.group_idx < 0) {
      next = -1;
      continue;
    }
    if ((amount < choice.room ? amount : choice.room) < config.min_routes) continue;
    const Group group = aligned_group(slots.num_ranks, choice.level, choice.group_idx);
    commit(config, scratch, group, expert, owner, amount, target,
           plan.quota + static_cast<size_t>(count) * slots.num_ranks);
    plan.broadcasts[count++] = {expert, owner, choice.level, choice.group_idx, -1, -1};
  }
}

// Stage 3: the lowest helper index free on all members; coarse levels first, then placement order.
// Aligned groups are nested or disjoint, so a common free index always exists.
ISER_HD inline void color_slots(const PlanConfig& config, const PlanView& plan, int32_t count) {
  const int32_t levels = num_group_levels(config.slots.num_ranks, config.min_group_size);
  for (int32_t level = 0; level < levels; ++level) {
    for (int32_t b = 0; b < count; ++b) {
      if (plan.broadcasts[b].level != level) continue;
      const Group group = plan.broadcasts[b].group(config.slots.num_ranks);
      uint32_t used = 0;
      for (int32_t other = 0; other < count; ++other) {
        const Broadcast& o = plan.broadcasts[other];
        if (o.helper_idx >= 0 && group.meets(o.group(config.slots.num_ranks))) {
          used |= 1u << o.helper_idx;
        }
      }
      int32_t slot = 0;
      while (used >> slot & 1u) ++slot;
      plan.broadcasts[b].helper_idx = slot;
    }
  }
}

}  // namespace iser::haloq
