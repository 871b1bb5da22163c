#include "ffi/cpu/replay.h"

#include <algorithm>
#include <vector>

namespace iser::cpu {
namespace {

// One plan's arrays, used again for every plan.
struct PlanBuffers {
  explicit PlanBuffers(const PlanConfig& config)
      : scratch_bytes(plan_scratch_bytes(config) / sizeof(int64_t) + 1),
        broadcasts(config.max_broadcasts()),
        quota(static_cast<size_t>(config.max_broadcasts()) * config.slots.num_ranks),
        before(config.slots.num_ranks),
        load(config.slots.num_ranks),
        sent(config.slots.num_ranks),
        local(config.slots.num_ranks),
        owner_copies(config.slots.num_ranks),
        scratch(plan_scratch(config, scratch_bytes.data())) {}

  PlanView view() {
    return {broadcasts.data(), quota.data(), before.data(), load.data(), &count, &target};
  }

  std::vector<int64_t> scratch_bytes;
  std::vector<Broadcast> broadcasts;
  std::vector<int32_t> quota, before, load, sent, local, owner_copies;
  int32_t count = 0, target = 0;
  PlanScratch scratch;
};

int32_t largest(const std::vector<int32_t>& values) {
  return *std::max_element(values.begin(), values.end());
}

int32_t largest_difference(const std::vector<int32_t>& a, const std::vector<int32_t>& b) {
  int32_t result = 0;
  for (size_t r = 0; r < a.size(); ++r) result = std::max(result, a[r] - b[r]);
  return result;
}

// Routes that leave each router, and those of them that stay when every expert runs at home.
void count_home_routes(const SlotSpace& slots, const int32_t* counts, PlanBuffers& plan) {
  const int32_t home = slots.num_experts / slots.num_ranks;
  for (int32_t r = 0; r < slots.num_ranks; ++r) {
    const int32_t* row = counts + static_cast<size_t>(r) * slots.num_experts;
    int32_t sum = 0, own = 0;
    for (int32_t e = 0; e < slots.num_experts; ++e) sum += row[e];
    for (int32_t e = r * home; e < (r + 1) * home; ++e) own += row[e];
    plan.sent[r] = sum;
    plan.local[r] = own;
  }
}

// A route stays on its source rank as far as that rank has quota.
void count_replicated_routes(const SlotSpace& slots, const int32_t* counts, PlanBuffers& plan) {
  for (int32_t b = 0; b < plan.count; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    const int32_t* quota = plan.quota.data() + static_cast<size_t>(b) * slots.num_ranks;
    for (int32_t r = 0; r < slots.num_ranks; ++r) {
      const int32_t own = counts[static_cast<size_t>(r) * slots.num_experts + row.expert];
      plan.local[r] += std::min(own, quota[r]) - (r == row.owner ? own : 0);
    }
  }
}

void count_copies(const SlotSpace& slots, PlanBuffers& plan, int32_t* held, int32_t* figures) {
  std::fill(plan.owner_copies.begin(), plan.owner_copies.end(), 0);
  std::fill(held, held + static_cast<size_t>(slots.num_ranks) * slots.num_helper_slots, -1);
  for (int32_t b = 0; b < plan.count; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    const Group group = row.group(slots.num_ranks);
    const bool inside = group.contains(row.owner);
    figures[kRemoteCopies] += group.size() - inside;
    figures[kWithoutOwner] += !inside;
    figures[kSlotsUsed] += group.size();
    ++plan.owner_copies[row.owner];
    for (int32_t r = group.begin; r < group.end; ++r) {
      held[r * slots.num_helper_slots + row.helper_idx] = row.expert;
    }
  }
  figures[kBroadcasts] = plan.count;
  figures[kOwnerCopies] = largest(plan.owner_copies);
}

void compare_slots(const SlotSpace& slots, const int32_t* before, const int32_t* held,
                   int32_t* figures) {
  const int32_t size = slots.num_helper_slots;
  for (int32_t r = 0; r < slots.num_ranks; ++r, before += size, held += size) {
    int32_t used = 0;
    for (int32_t s = 0; s < size; ++s) {
      if (held[s] < 0) continue;
      ++used;
      figures[kReplicasStayed] += std::find(before, before + size, held[s]) != before + size;
    }
    figures[kSlotsUsedMax] = std::max(figures[kSlotsUsedMax], used);
  }
}

void replay_plan(const PlanConfig& config, const int32_t* counts, PlanBuffers& plan,
                 const int32_t* before, int32_t* held, int32_t* figures) {
  std::fill(figures, figures + kNumReplayFigures, 0);
  plan_counts(config, counts, nullptr, plan.scratch, plan.view());
  count_home_routes(config.slots, counts, plan);
  figures[kLoadBeforeMax] = largest(plan.before);
  for (int32_t load : plan.before) figures[kLoadSum] += load;
  figures[kSendOff] = largest_difference(plan.sent, plan.local);
  figures[kRecvOff] = largest_difference(plan.before, plan.local);
  count_replicated_routes(config.slots, counts, plan);
  figures[kLoadMax] = largest(plan.load);
  figures[kSend] = largest_difference(plan.sent, plan.local);
  figures[kRecv] = largest_difference(plan.load, plan.local);
  count_copies(config.slots, plan, held, figures);
  compare_slots(config.slots, before, held, figures);
}

}  // namespace

void run_replay_batch(const ReplayBatch& batch) {
  const SlotSpace& slots = batch.config.slots;
  const size_t counts_size = static_cast<size_t>(slots.num_ranks) * slots.num_experts;
  const size_t table_size = static_cast<size_t>(slots.num_ranks) * slots.num_helper_slots;
  PlanBuffers plan(batch.config);
  for (int64_t i = 0; i < batch.num_iterations; ++i) {
    for (int64_t layer = 0; layer < batch.num_layers; ++layer) {
      const size_t n = i * batch.num_layers + layer;
      int32_t* before = batch.slots + n * table_size;
      replay_plan(batch.config, batch.counts[i] + layer * counts_size, plan, before,
                  before + batch.num_layers * table_size, batch.figures + n * kNumReplayFigures);
    }
  }
}

}  // namespace iser::cpu
