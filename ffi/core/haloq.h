// HALO-Q: which hot experts are copied where, and who computes how much of them.
//
// The five stages of the paper's Algorithm 1 as functions over plain arrays, shared by host and
// device. All arithmetic is on integers and every tie is broken by an index, so every rank derives
// the same plan from the same counts. jax_iser/reference/planner.py is the twin that defines each
// stage; the two agree bit for bit.
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

namespace haloq {

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

ISER_HD inline void list_hosted(const PlanConfig& config, const PlanScratch& scratch,
                                const PlanView& plan, int32_t count) {
  const int32_t limit = 2 * config.slots.num_helper_slots;
  for (int32_t r = 0; r < config.slots.num_ranks; ++r) scratch.num_hosted[r] = 0;
  for (int32_t b = 0; b < count; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    const Group group = row.group(config.slots.num_ranks);
    for (int32_t r = group.begin; r < group.end; ++r) {
      scratch.hosted[static_cast<size_t>(r) * limit + scratch.num_hosted[r]++] = b;
    }
    if (!group.contains(row.owner)) {
      scratch.hosted[static_cast<size_t>(row.owner) * limit + scratch.num_hosted[row.owner]++] = b;
    }
  }
}

ISER_HD inline int32_t positive(int32_t value) { return value > 0 ? value : 0; }
ISER_HD inline int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

// Visits the broadcasts that both ranks host, in placement order.
template <typename Visit>
ISER_HD inline void for_each_shared(const PlanConfig& config, const PlanScratch& scratch, int32_t a,
                                    int32_t c, Visit visit) {
  const int32_t limit = 2 * config.slots.num_helper_slots;
  const int32_t *of_a = scratch.hosted + static_cast<size_t>(a) * limit,
                *of_c = scratch.hosted + static_cast<size_t>(c) * limit;
  const int32_t *end_a = of_a + scratch.num_hosted[a], *end_c = of_c + scratch.num_hosted[c];
  while (of_a != end_a && of_c != end_c) {
    if (*of_a == *of_c) {
      visit(*of_a);
      ++of_a, ++of_c;
    } else if (*of_a < *of_c) {
      ++of_a;
    } else {
      ++of_c;
    }
  }
}

// Turns quota rows into what each rank lacks, its own routes beyond its quota (spare where
// negative), and back: q = C - (C - q).
ISER_HD inline void swap_quota_and_lack(const PlanConfig& config, const int32_t* counts,
                                        const PlanView& plan, int32_t count) {
  const int32_t num_ranks = config.slots.num_ranks;
  for (int32_t b = 0; b < count; ++b) {
    const int32_t* column = counts + plan.broadcasts[b].expert;
    int32_t* row = plan.quota + static_cast<size_t>(b) * num_ranks;
    for (int32_t r = 0; r < num_ranks; ++r) {
      row[r] = column[static_cast<size_t>(r) * config.slots.num_experts] - row[r];
    }
  }
}

// Stage 4, one direction of one pair, on `lack`: `a` takes quota that its own routes need and gives
// what they do not, in equal amounts. A broadcast never both gives and takes, so the second walk
// may write while it reads.
ISER_HD inline void trade(const PlanConfig& config, const PlanScratch& scratch, int32_t* lack,
                          int32_t a, int32_t c) {
  const size_t num_ranks = config.slots.num_ranks;
  int64_t take = 0, give = 0;
  for_each_shared(config, scratch, a, c, [&](int32_t b) {
    const int32_t* row = lack + b * num_ranks;
    take += smaller(positive(row[a]), positive(-row[c]));
    give += positive(-row[a]);
  });
  int64_t take_left = take < give ? take : give, give_left = take_left;
  if (take_left == 0) return;
  for_each_shared(config, scratch, a, c, [&](int32_t b) {
    int32_t* row = lack + b * num_ranks;
    int64_t taken = smaller(positive(row[a]), positive(-row[c])), given = positive(-row[a]);
    if (taken > take_left) taken = take_left;
    if (given > give_left) given = give_left;
    take_left -= taken;
    give_left -= given;
    row[a] -= static_cast<int32_t>(taken - given);
    row[c] += static_cast<int32_t>(taken - given);
  });
}

// Pair `i` of ring `t` of the circle method over n = num_ranks rounded up to even; an index of
// num_ranks is the bye.
ISER_HD inline int32_t ring_member(int32_t n, int32_t t, int32_t i) {
  const int32_t at = t + i - 1;
  return i == 0 ? n - 1 : at < n - 1 ? at : at - (n - 1);
}

ISER_HD inline void repair(const PlanConfig& config, const PlanScratch& scratch,
                           const int32_t* counts, const PlanView& plan, int32_t count) {
  if (count == 0) return;
  list_hosted(config, scratch, plan, count);
  swap_quota_and_lack(config, counts, plan, count);
  const int32_t num_ranks = config.slots.num_ranks, n = num_ranks + num_ranks % 2;
  for (int32_t pass = 0; pass < 2; ++pass) {
    for (int32_t t = 0; t < n - 1; ++t) {
      for (int32_t i = 0; i < n / 2; ++i) {
        const int32_t a = ring_member(n, t, i), c = ring_member(n, t, n - 1 - i);
        if (a >= num_ranks || c >= num_ranks) continue;
        trade(config, scratch, plan.quota, a, c);
        trade(config, scratch, plan.quota, c, a);
      }
    }
  }
  swap_quota_and_lack(config, counts, plan, count);
}

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
