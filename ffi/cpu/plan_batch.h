// HALO-Q on host arrays: one plan, or many over threads. No Domain, no XLA.
#pragma once

#include <cstdint>

#include "ffi/core/haloq.h"

namespace iser::cpu {

// Plans `num_plans` count matrices [num_plans, num_ranks, num_experts]. Outputs are stacked the
// same way; `resident` is [num_ranks, S], shared by all, or null. `flow` [num_plans, P, P] i64 may
// be null: routes of source s (row) computed on r (column).
struct PlanBatch {
  PlanConfig config;
  int64_t num_plans;
  const int32_t* counts;
  const int32_t* resident;
  Broadcast* broadcasts;
  int32_t* quota;
  int32_t* load_before;
  int32_t* load;
  int32_t* num_broadcasts;
  int32_t* target;
  int64_t* flow;
};

// Index of the first plan whose counts are negative or number 2^31 routes or more, -1 if all are
// fine: to be asked before run_plan_batch.
int64_t find_bad_counts(const PlanBatch& batch);

void run_plan_batch(const PlanBatch& batch, int num_threads);

}  // namespace iser::cpu
