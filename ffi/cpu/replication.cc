// replication: whole bundles in slices to the helper slots of a group, then READY.
//
// Owner-direct: the owner stores every slice to each member. SAMI: member i pulls slices
// j = i (mod g) from the owner and stores them to each member, so that g threads share the work.
// The owner computes at home even where it is a member, so its own helper slot is left as it is.
#include <algorithm>
#include <cstring>

#include "ffi/core/slices.h"
#include "ffi/cpu/domain.h"

namespace iser::cpu {
namespace {

constexpr uint32_t kSliceBytes = 256 << 10;

// How many earlier broadcasts the owner exports: the place of this one in its staging section.
int32_t export_index(const SharedPlan& plan, int32_t index) {
  int32_t count = 0;
  for (int32_t b = 0; b < index; ++b)
    count += plan.broadcasts[b].owner == plan.broadcasts[index].owner;
  return count;
}

bool has_remote_member(const Domain& domain, const Broadcast& row) {
  const Group group = row.group(domain.shape().slots.num_ranks);
  for (int32_t r = group.begin; r < group.end; ++r) {
    if (!domain.is_local(r)) return true;
  }
  return false;
}

// Where this process reads the bundle: at home, or where the owner has staged it.
void source_planes(const Domain& domain, const SharedPlan& plan, int32_t index,
                   const uint8_t* planes[kMaxPlanes]) {
  const Broadcast& row = plan.broadcasts[index];
  if (domain.home_planes(row.owner, row.expert, plan.generation, planes)) return;
  const BundleLayout& bundle = domain.bundle();
  const uint8_t* staged = domain.block(row.owner).staged(export_index(plan, index));
  for (int32_t i = 0; i < bundle.num_planes; ++i) planes[i] = staged + bundle.planes[i].offset;
}

// Stores the rank's share of a broadcast to every member but the owner.
void store_slices(Domain& domain, const Invocation& invocation, int32_t index, int32_t rank) {
  const DomainShape& shape = domain.shape();
  const BundleLayout& bundle = domain.bundle();
  const Broadcast& row = invocation.plan->broadcasts[index];
  const Group group = row.group(shape.slots.num_ranks);
  const Share share = device_share(row, group, rank, 1);
  if (share.first == share.last || !domain.begin_reading()) return;
  const int32_t bank = domain.bank_of(invocation.call.layer);
  const uint8_t* planes[kMaxPlanes];
  source_planes(domain, *invocation.plan, index, planes);
  const uint32_t total = num_slices(bundle, kSliceBytes);
  for (uint32_t j = share.first; j < total; j += share.step) {
    const PlaneSlice slice = slice_at(bundle, j, kSliceBytes);
    for (int32_t r = group.begin; r < group.end; ++r) {
      if (r == row.owner) continue;
      uint8_t* helper = domain.block(r).helper(shape, bank, row.helper_idx);
      std::memcpy(helper + bundle.planes[slice.plane].offset + slice.begin,
                  planes[slice.plane] + slice.begin, slice.bytes);
    }
  }
  domain.end_reading();
}

}  // namespace

bool stage_bundles(Domain& domain, const Invocation& invocation, int32_t rank) {
  const SharedPlan& plan = *invocation.plan;
  const BundleLayout& bundle = domain.bundle();
  const bool is_staging = domain.is_multi_process() && !domain.is_placed(rank, plan.generation);
  for (int32_t b = 0; b < plan.num_broadcasts && is_staging; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    if (row.owner != rank || static_cast<CopyWay>(row.how) != CopyWay::kSami) continue;
    if (!has_remote_member(domain, row)) continue;
    if (!domain.begin_reading()) return false;
    const uint8_t* planes[kMaxPlanes];
    domain.home_planes(rank, row.expert, plan.generation, planes);
    uint8_t* staged = domain.block(rank).staged(export_index(plan, b));
    for (int32_t i = 0; i < bundle.num_planes; ++i) {
      std::memcpy(staged + bundle.planes[i].offset, planes[i], bundle.planes[i].bytes);
    }
    domain.end_reading();
  }
  domain.arrive(Stage::kStaged, rank, invocation.generation);
  return !domain.has_failed();
}

bool replicate(Domain& domain, const Invocation& invocation, int32_t rank) {
  const SharedPlan& plan = *invocation.plan;
  if (domain.is_multi_process() && plan.num_broadcasts > 0 &&
      !domain.wait(Stage::kStaged, rank, invocation)) {
    return false;
  }
  for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
    store_slices(domain, invocation, b, rank);
  }
  return !domain.has_failed();
}

void publish_ready(Domain& domain, const Invocation& invocation, int32_t rank) {
  domain.block(rank).words()->plan_hash = invocation.plan->hash;
  domain.arrive(Stage::kReady, rank, invocation.generation);
}

}  // namespace iser::cpu
