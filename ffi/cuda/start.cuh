// start's part on MAIN: finds the Domain, keeps what XLA may reuse, and says so to COPY by a cell.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ffi/cuda/protocol.cuh"

namespace iser::cuda {

struct StartLaunch {
  Directory* directory;
  const uint32_t* handle;  // [kNumWords]
  uint64_t sizes;          // digest of the program's configuration
  CallCell* cell;
  const int32_t* params;    // [3]: layer, weights_version, is_balanced
  const int32_t* topk_ids;  // [num_routes]
  int64_t num_routes;       // of the device
  int32_t num_stacked;      // layers that the weights are stacked over, 0 for none
  int32_t is_plan_only;
  uint32_t* ticket;  // [kNumWords], null when plan-only
};

// Loads the kernel on the current device.
cudaError_t prepare_start();

// Where the handle names no open Domain of these sizes, the cell's table is null and the directory
// counts a misuse. A layer out of range, or a call begun before the last one's end, fails the
// Domain.
cudaError_t launch_start(const StartLaunch& launch, cudaStream_t stream);

// For tests: fills the token and combine sections of the device's ranks with 0xff, a NaN in every
// dtype, before the ticket's fused_moe begins.
struct PoisonLaunch {
  const Directory* directory;
  const uint32_t* ticket;
  uint64_t sizes;
  int32_t ranks_per_device;
};
cudaError_t launch_poison(const PoisonLaunch& launch, cudaStream_t stream);

}  // namespace iser::cuda
