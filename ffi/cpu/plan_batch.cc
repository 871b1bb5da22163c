#include "ffi/cpu/plan_batch.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <vector>

namespace iser::cpu {
namespace {

// Routes by source and computing rank: replicated experts by their shares, the rest at home.
void count_flow(const PlanConfig& config, const int32_t* counts, const PlanView& plan,
                int64_t* flow) {
  const int32_t ranks = config.slots.num_ranks, experts = config.slots.num_experts;
  std::fill(flow, flow + static_cast<size_t>(ranks) * ranks, 0);
  for (int32_t s = 0; s < ranks; ++s) {
    for (int32_t e = 0; e < experts; ++e) {
      flow[s * ranks + config.slots.owner(e)] += counts[static_cast<size_t>(s) * experts + e];
    }
  }
  std::vector<int32_t> share(ranks);
  for (int32_t b = 0; b < *plan.num_broadcasts; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    for (int32_t s = 0; s < ranks; ++s) {
      source_share(config, counts, row.expert, plan.quota + static_cast<size_t>(b) * ranks, s,
                   share.data());
      flow[s * ranks + row.owner] -= counts[static_cast<size_t>(s) * experts + row.expert];
      for (int32_t h = 0; h < ranks; ++h) flow[s * ranks + h] += share[h];
    }
  }
}

}  // namespace

int64_t find_bad_counts(const PlanBatch& batch) {
  const size_t size =
      static_cast<size_t>(batch.config.slots.num_ranks) * batch.config.slots.num_experts;
  for (int64_t i = 0; i < batch.num_plans; ++i) {
    const int32_t* counts = batch.counts + i * size;
    int64_t total = 0;
    int32_t signs = 0;
    for (size_t j = 0; j < size; ++j) {
      total += counts[j];
      signs |= counts[j];
    }
    if (signs < 0 || total > INT32_MAX) return i;
  }
  return -1;
}

void run_plan_batch(const PlanBatch& batch, int num_threads) {
  const SlotSpace& slots = batch.config.slots;
  const size_t rows = batch.config.max_broadcasts(), ranks = slots.num_ranks;
  std::atomic<int64_t> next{0};
  const auto work = [&] {
    std::vector<int64_t> scratch_bytes(plan_scratch_bytes(batch.config) / sizeof(int64_t) + 1);
    const PlanScratch scratch = plan_scratch(batch.config, scratch_bytes.data());
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < batch.num_plans;) {
      const int32_t* counts = batch.counts + i * ranks * slots.num_experts;
      const PlanView plan{batch.broadcasts + i * rows,   batch.quota + i * rows * ranks,
                          batch.load_before + i * ranks, batch.load + i * ranks,
                          batch.num_broadcasts + i,      batch.target + i};
      plan_counts(batch.config, counts, batch.resident, scratch, plan);
      if (batch.flow) count_flow(batch.config, counts, plan, batch.flow + i * ranks * ranks);
    }
  };
  std::vector<std::thread> threads;
  for (int t = 1; t < std::min<int64_t>(num_threads, batch.num_plans); ++t) {
    threads.emplace_back(work);
  }
  work();
  for (std::thread& thread : threads) thread.join();
}

}  // namespace iser::cpu
