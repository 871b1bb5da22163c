// plan: counts exchanged, HALO-Q, every route's slot, and the lists that peers pull by.
#include <algorithm>
#include <cstring>

#include "ffi/cpu/domain.h"

namespace iser::cpu {

void publish_counts(Domain& domain, const Invocation& invocation, int32_t rank, int32_t local_idx) {
  const DomainShape& shape = domain.shape();
  const BlockView block = domain.block(rank);
  const StartCall& call = invocation.call;
  int32_t* counts = block.counts(shape, invocation.generation);
  std::fill(counts, counts + shape.slots.num_experts, 0);
  const size_t routes = static_cast<size_t>(call.num_tokens) * shape.top_k;
  const int32_t* ids = invocation.topk_ids.data() + local_idx * routes;
  for (size_t i = 0; i < routes; ++i) {
    if (is_valid_expert(ids[i], shape.slots.num_experts)) ++counts[ids[i]];
  }
  CallTag& tag = block.words()->tags[invocation.generation & 1];
  tag = {invocation.generation, call.layer, call.num_tokens, call.is_balanced, call.is_plan_only,
         call.weights_version,  {}};
  const size_t first = static_cast<size_t>(local_idx) * shape.slots.num_home();
  for (int32_t i = 0; i < domain.bundle().num_planes; ++i) {
    tag.weights[i] = reinterpret_cast<uint64_t>(call.weights[i]);
    if (call.weights[i]) tag.weights[i] += first * domain.bundle().planes[i].bytes;
  }
  domain.arrive(Stage::kCounts, rank, invocation.generation);
}

bool Domain::tags_agree(const Invocation& invocation, int32_t rank) {
  const StartCall& call = invocation.call;
  for (int32_t r = 0; r < options.shape.slots.num_ranks; ++r) {
    const CallTag& tag = block(r).words()->tags[invocation.generation & 1];
    const bool agrees = tag.generation == invocation.generation && tag.layer == call.layer &&
                        tag.num_tokens == call.num_tokens && tag.is_balanced == call.is_balanced &&
                        tag.is_plan_only == call.is_plan_only &&
                        tag.weights_version == call.weights_version;
    if (agrees) continue;
    fail({static_cast<int32_t>(ErrorCode::kCallMismatch), rank, r, call.layer,
          static_cast<int32_t>(Stage::kCounts), invocation.generation,
          static_cast<uint64_t>(call.layer), static_cast<uint64_t>(tag.layer)});
    return false;
  }
  return true;
}

bool Domain::compute_plan(const Invocation& invocation, int32_t rank, SharedPlan& plan) {
  if (!tags_agree(invocation, rank)) return false;
  PlanConfig config = options.plan_config();
  if (!invocation.call.is_balanced) config.gain_threshold = INT32_MAX;  // never worth it
  const size_t ranks = config.slots.num_ranks, experts = config.slots.num_experts;
  const size_t rows = config.max_broadcasts();
  plan.generation = invocation.generation;
  plan.counts.resize(ranks * experts);
  for (size_t r = 0; r < ranks; ++r) {
    const int32_t* counts = block(r).counts(options.shape, invocation.generation);
    std::copy(counts, counts + experts, plan.counts.begin() + r * experts);
  }
  plan.broadcasts.resize(rows);
  plan.quota.resize(rows * ranks);
  plan.load_before.resize(ranks);
  plan.load.resize(ranks);
  SlotTable& table = slot_tables_[bank_of(invocation.call.layer)];
  const bool holds = options.resident && table.weights_version == invocation.call.weights_version;
  plan_counts(config, plan.counts.data(), holds ? table.expert.data() : nullptr,
              plan_scratch(config, plan_scratch_.data()), plan.view());
  plan.hash = plan_hash(config, plan.view());
  if (options.resident && !invocation.call.is_plan_only) update_slot_table(invocation, plan);
  return true;
}

void Domain::update_slot_table(const Invocation& invocation, const SharedPlan& plan) {
  SlotTable& table = slot_tables_[bank_of(invocation.call.layer)];
  if (table.weights_version != invocation.call.weights_version) {
    std::fill(table.expert.begin(), table.expert.end(), -1);
    table.weights_version = invocation.call.weights_version;
  }
  for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    const Group group = row.group(options.shape.slots.num_ranks);
    for (int32_t r = group.begin; r < group.end; ++r) {
      table.expert[static_cast<size_t>(r) * options.shape.slots.num_helper_slots + row.helper_idx] =
          row.expert;
    }
  }
}

std::shared_ptr<SharedPlan> Domain::plan_for(const Invocation& invocation, int32_t rank) {
  if (!wait(Stage::kCounts, rank, invocation)) return nullptr;
  std::lock_guard lock(plan_mutex_);
  if (plan_ && plan_->generation == invocation.generation) return plan_;
  // Only a fresh or fully released object is written: readers of the last plan may still hold it.
  auto plan = std::make_shared<SharedPlan>();
  if (!compute_plan(invocation, rank, *plan)) return nullptr;
  return plan_ = plan;
}

namespace {

// Walks one source's routes of one expert through the hosts that take them.
struct Cursor {
  const int32_t* share = nullptr;  // [num_ranks], null where the expert stays at home
  int32_t broadcast = -1;
  int32_t host = -1;
  int32_t left = 0;
};

// Kept routes come first, then the hosts in rank order; a source never appears twice.
int32_t next_host(Cursor& cursor, int32_t source, int32_t num_ranks) {
  if (cursor.host < 0) {
    cursor.left = cursor.share[source];
    cursor.host = num_ranks;  // kept routes
  }
  if (cursor.host == num_ranks) {
    if (cursor.left > 0) {
      --cursor.left;
      return source;
    }
    cursor.host = 0;
    cursor.left = source == 0 ? 0 : cursor.share[0];
  }
  while (cursor.left == 0) {
    ++cursor.host;
    cursor.left = cursor.host == source ? 0 : cursor.share[cursor.host];
  }
  --cursor.left;
  return cursor.host;
}

void build_send_lists(const DomainShape& shape, const BlockView& block, const int32_t* route_slot,
                      size_t routes) {
  int32_t* starts = block.section<int32_t>(Section::kSendStarts);
  int32_t* sorted = block.section<int32_t>(Section::kSendRoutes);
  const int32_t num_slots = shape.slots.num_slots();
  std::fill(starts, starts + num_slots + 1, 0);
  for (size_t i = 0; i < routes; ++i) {
    if (route_slot[i] >= 0) ++starts[route_slot[i] + 1];
  }
  for (int32_t s = 0; s < num_slots; ++s) starts[s + 1] += starts[s];
  std::vector<int32_t> at(starts, starts + num_slots);
  for (size_t i = 0; i < routes; ++i) {
    if (route_slot[i] >= 0) sorted[at[route_slot[i]]++] = static_cast<int32_t>(i);
  }
}

}  // namespace

void rewrite_routes(Domain& domain, Invocation& invocation, int32_t rank, int32_t local_idx) {
  const DomainShape& shape = domain.shape();
  const SlotSpace& slots = shape.slots;
  const PlanConfig config = domain.options.plan_config();
  const SharedPlan& plan = *invocation.plan;
  std::vector<Cursor> cursors(slots.num_experts);
  std::vector<int32_t> shares(static_cast<size_t>(plan.num_broadcasts) * slots.num_ranks);
  for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
    int32_t* share = shares.data() + static_cast<size_t>(b) * slots.num_ranks;
    const int32_t expert = plan.broadcasts[b].expert;
    source_share(config, plan.counts.data(), expert,
                 plan.quota.data() + static_cast<size_t>(b) * slots.num_ranks, rank, share);
    cursors[expert].share = share;
    cursors[expert].broadcast = b;
  }
  const size_t routes = static_cast<size_t>(invocation.call.num_tokens) * shape.top_k;
  const int32_t* ids = invocation.topk_ids.data() + local_idx * routes;
  int32_t* route_slot = invocation.route_slot.data() + local_idx * routes;
  for (size_t i = 0; i < routes; ++i) {
    if (!is_valid_expert(ids[i], slots.num_experts)) {
      route_slot[i] = -1;
      continue;
    }
    Cursor& cursor = cursors[ids[i]];
    route_slot[i] = slots.home_slot(ids[i]);
    if (!cursor.share) continue;
    const int32_t host = next_host(cursor, rank, slots.num_ranks);
    if (host != slots.owner(ids[i])) {
      route_slot[i] = slots.helper_slot(host, plan.broadcasts[cursor.broadcast].helper_idx);
    }
  }
  build_send_lists(shape, domain.block(rank), route_slot, routes);
}

void write_plan_outputs(Domain& domain, const Invocation& invocation, const PlanOutputs& outputs,
                        bool ok) {
  const PlanConfig config = domain.options.plan_config();
  const size_t ranks = config.slots.num_ranks, rows = config.max_broadcasts();
  *outputs.status = ok ? 0 : domain.error().code;
  *outputs.generation = invocation.generation;
  if (!ok) {
    std::fill_n(outputs.route_slot, invocation.route_slot.size(), -1);
    std::fill_n(outputs.broadcasts, rows * 6, -1);
    std::fill_n(outputs.quota, rows * ranks, 0);
    std::fill_n(outputs.load_before, ranks, 0);
    std::fill_n(outputs.load, ranks, 0);
    *outputs.num_broadcasts = 0;
    return;
  }
  const SharedPlan& plan = *invocation.plan;
  std::copy(invocation.route_slot.begin(), invocation.route_slot.end(), outputs.route_slot);
  if (rows > 0) {
    std::memcpy(outputs.broadcasts, plan.broadcasts.data(), rows * sizeof(Broadcast));
    std::memcpy(outputs.quota, plan.quota.data(), rows * ranks * sizeof(int32_t));
  }
  std::copy(plan.load_before.begin(), plan.load_before.end(), outputs.load_before);
  std::copy(plan.load.begin(), plan.load.end(), outputs.load);
  *outputs.num_broadcasts = plan.num_broadcasts;
}

}  // namespace iser::cpu
