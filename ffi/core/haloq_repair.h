// HALO-Q's stage 4: pairs of ranks trade quota, so that fewer routes travel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/haloq_types.h"

namespace iser::haloq {

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

}  // namespace iser::haloq
