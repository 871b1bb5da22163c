// plan on a GPU: one launch a call, for all ranks of the device.
//
// The launch histograms topk_ids, exchanges counts with every device, derives the plan as
// ffi/core/haloq.h does (to the bit), rewrites every route and sorts the routes by physical slot
// into the ranks' send lists.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ffi/core/haloq.h"
#include "ffi/cuda/protocol.cuh"

namespace iser::cuda {

constexpr int kPlanThreads = 512;
constexpr int kMaxPlanExperts = 1024;
constexpr int kMaxPlanHelperSlots = 16;

// Moments of one CTA: SM clock at each, and %globaltimer at the first and the last.
enum class PlanStamp : int32_t {
  kStart = 0,
  kRanked = 1,     // histogram and the routes' places within the CTA
  kArrived = 2,    // counts stored to every device
  kExchanged = 3,  // counts of all ranks are here
  kSummed = 4,
  kPlaced = 5,
  kRepaired = 6,
  kEnd = 7,
  kStartNs = 8,
  kEndNs = 9,
  kNumStamps = 10,
};

// How a device's plan kernel is launched; made once, before any launch.
struct PlanGrid {
  int32_t ranks_per_device;
  int32_t ctas_per_rank;  // one cluster a rank
  int64_t max_routes;     // of a rank
  int32_t smem_bytes;
  bool is_packed_shared;  // the CTA's routes fit in shared memory
  bool is_cooperative;

  bool operator==(const PlanGrid& other) const {
    return ranks_per_device == other.ranks_per_device && ctas_per_rank == other.ctas_per_rank &&
           max_routes == other.max_routes && smem_bytes == other.smem_bytes &&
           is_packed_shared == other.is_packed_shared && is_cooperative == other.is_cooperative;
  }
};

// What helper slots of a bank hold, for resident replicas.
struct SlotTable {
  int32_t weights_version;
  int32_t expert[];  // [P, S], -1 for none
};

ISER_HD inline size_t slot_table_bytes(const PlanConfig& config) {
  return align_up(sizeof(SlotTable) + sizeof(int32_t) * config.max_broadcasts(), kBlockAlign);
}

struct PlanLaunch {
  const CallCell* cell;  // device memory
  PlanConfig config;
  int32_t num_tokens;  // of one rank
  int32_t top_k;
  const int32_t* topk_ids;  // [V*num_tokens, top_k]; null for what start has kept
  int32_t is_plan_only;
  const uint8_t* weights[kMaxPlanes];  // of the device's first expert
  int32_t is_stacked;                  // weights have a leading layer axis
  PlanOutputs outputs;                 // device memory; null pointers for the Domain's own
  int64_t* stamps;                     // [CTAs, kNumStamps] or null
};

// Loads the kernels and chooses the grid: the largest cluster a rank, at most `max_ctas_per_rank`,
// with which all ranks of the device are resident at once. cudaErrorInvalidValue where the sizes
// exceed what the kernel takes, cudaErrorCooperativeLaunchTooLarge where the ranks do not fit.
cudaError_t prepare_plan(const PlanConfig& config, int32_t ranks_per_device, int64_t max_routes,
                         int32_t max_ctas_per_rank, PlanGrid* grid);

// cudaErrorInvalidValue where the call has more routes than were prepared for.
cudaError_t launch_plan(const PlanGrid& grid, const PlanLaunch& launch, cudaStream_t stream);

// Stages 2 to 4 alone, on one CTA, from counts [num_ranks, num_experts]; all arrays in device
// memory. `resident` [num_ranks, num_helper_slots] may be null; `stamps` too.
struct PlanCountsLaunch {
  PlanConfig config;
  const int32_t* counts;
  const int32_t* resident;
  PlanView plan;
  uint64_t* hash;
  int64_t* stamps;  // [kNumStamps]
};

cudaError_t prepare_plan_counts(const PlanConfig& config);
cudaError_t launch_plan_counts(const PlanCountsLaunch& launch, cudaStream_t stream);

}  // namespace iser::cuda
