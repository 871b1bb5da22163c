// replication: whole bundles in slices to the helper slots of a group, then READY.
//
// Owner-direct: the owner stores every slice to each member. SAMI: member i pulls slices
// j = i (mod g) from the owner and stores them to each member, so that g threads share the work.
// The owner computes at home even where it is a member, so its own helper slot is left as it is.
#include <algorithm>
#include <cstring>

#include "ffi/cpu/domain.h"

namespace iser::cpu {
namespace {

constexpr size_t kSliceBytes = 256 << 10;

struct Slice {
  int plane;
  size_t offset, bytes;
};

size_t slices_per_plane(const DomainShape& shape) {
  return (shape.plane_bytes() + kSliceBytes - 1) / kSliceBytes;
}

Slice slice_at(const DomainShape& shape, size_t index) {
  const size_t per_plane = slices_per_plane(shape), offset = index % per_plane * kSliceBytes;
  return {static_cast<int>(index / per_plane), offset,
          std::min(kSliceBytes, shape.plane_bytes() - offset)};
}

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
                   const uint8_t* planes[3]) {
  const Broadcast& row = plan.broadcasts[index];
  if (domain.home_planes(row.owner, row.expert, plan.generation, planes)) return;
  const uint8_t* staged = domain.block(row.owner).staged(domain.shape(), export_index(plan, index));
  for (int i = 0; i < 3; ++i) planes[i] = staged + i * domain.shape().plane_bytes();
}

// Stores slices first, first + step, ... to every member but the owner.
void store_slices(Domain& domain, const Invocation& invocation, int32_t index, size_t first,
                  size_t step) {
  if (!domain.begin_reading()) return;
  const DomainShape& shape = domain.shape();
  const Broadcast& row = invocation.plan->broadcasts[index];
  const Group group = row.group(shape.slots.num_ranks);
  const int32_t bank = domain.bank_of(invocation.call.layer);
  const uint8_t* planes[3];
  source_planes(domain, *invocation.plan, index, planes);
  for (size_t j = first; j < 3 * slices_per_plane(shape); j += step) {
    const Slice slice = slice_at(shape, j);
    for (int32_t r = group.begin; r < group.end; ++r) {
      if (r == row.owner) continue;
      uint8_t* helper = domain.block(r).helper(shape, bank, row.helper_idx);
      std::memcpy(helper + slice.plane * shape.plane_bytes() + slice.offset,
                  planes[slice.plane] + slice.offset, slice.bytes);
    }
  }
  domain.end_reading();
}

}  // namespace

bool stage_bundles(Domain& domain, const Invocation& invocation, int32_t rank) {
  const SharedPlan& plan = *invocation.plan;
  const DomainShape& shape = domain.shape();
  const bool is_staging = domain.is_multi_process() && !domain.is_placed(rank, plan.generation);
  for (int32_t b = 0; b < plan.num_broadcasts && is_staging; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    if (row.owner != rank || static_cast<CopyWay>(row.how) != CopyWay::kSami) continue;
    if (!has_remote_member(domain, row)) continue;
    if (!domain.begin_reading()) return false;
    const uint8_t* planes[3];
    domain.home_planes(rank, row.expert, plan.generation, planes);
    uint8_t* staged = domain.block(rank).staged(shape, export_index(plan, b));
    for (int i = 0; i < 3; ++i) {
      std::memcpy(staged + i * shape.plane_bytes(), planes[i], shape.plane_bytes());
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
    const Broadcast& row = plan.broadcasts[b];
    const Group group = row.group(domain.shape().slots.num_ranks);
    switch (static_cast<CopyWay>(row.how)) {
      case CopyWay::kOwnerDirect:
        if (row.owner == rank) store_slices(domain, invocation, b, 0, 1);
        break;
      case CopyWay::kSami:
        if (group.contains(rank)) {
          store_slices(domain, invocation, b, rank - group.begin, group.size());
        }
        break;
      case CopyWay::kResident:
        break;
    }
  }
  return !domain.has_failed();
}

void publish_ready(Domain& domain, const Invocation& invocation, int32_t rank) {
  domain.block(rank).words()->plan_hash = invocation.plan->hash;
  domain.arrive(Stage::kReady, rank, invocation.generation);
}

}  // namespace iser::cpu
