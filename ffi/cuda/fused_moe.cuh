// fused_moe on a GPU: dispatch, both grouped products with the activation between, combine, for all
// ranks of a device; tiles of helper slots wait for READY. docs/fused_moe.md says how.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ffi/core/layout.h"
#include "ffi/cuda/protocol.cuh"

namespace iser::cuda {

enum class DType : int32_t { kF32 = 0, kBF16 = 1 };

enum class MoeEngine : int32_t {
  kAuto = 0,    // kTensor where it takes the sizes
  kTensor = 1,  // wgmma and TMA: bf16, D and I multiples of 8; FP8 weights, of 64
  kPlain = 2,   // CUDA cores: slow; f32 and bf16, rows of x of whole 16-byte words
};

// Where a call's time goes, for benchmarks: %globaltimer at moments, SM clocks summed over CTAs.
enum class MoeStamp : int32_t {
  kBeginNs = 0,     // the first kernel starts
  kDispatchNs = 1,  // every rank's tokens and send lists are readable
  kExpertsNs = 2,   // the first CTA of the expert kernel starts
  kTilesEndNs = 3,  // the last CTA of it ends
  kGateNs = 4,      // every route of this device's tokens is computed
  kEndNs = 5,
  kWaitRows = 6,   // clocks that tiles waited for rows
  kWaitInner = 7,  // for h
  kWaitReady = 8,  // for READY
  kGemmInner = 9,  // clocks in tiles of GEMM 1, by one warp a CTA
  kGemmHidden = 10,
  kIdle = 11,        // clocks without a tile
  kExtraTiles = 12,  // tiles of extra CTAs
  kNumStamps = 13,
};

struct FusedOptions {
  MoeEngine engine = MoeEngine::kAuto;
  int32_t num_sms = 0;    // CTAs of the expert kernel that wait for READY; 0: all SMs but copy_sms
  int32_t copy_sms = 8;   // CTAs more that do not; with num_sms, none before READY has come
  int32_t tile_rows = 0;  // of a tile, 64, 128 or (bf16) 256; 0: by the mean rows of an expert
  int32_t cluster_size = 0;  // CTAs that share the rows they load, 1 or 2; 0: 2 if little is lost
};

struct FusedLaunch {
  const Directory* directory;  // device memory, as all below
  const uint32_t* ticket;      // [kNumWords]
  uint64_t sizes;              // digest for which the program was compiled
  DomainShape shape;
  int32_t ranks_per_device;
  int32_t num_tokens;  // of one rank, at most shape.max_tokens
  int32_t max_routes_per_rank;
  DType dtype;
  const void* x;                    // [V*num_tokens, hidden]
  const float* topk_weights;        // [V*num_tokens, top_k]
  const void* weights[kMaxPlanes];  // [V*H, ...] each, in the order of PlaneIndex
  int32_t num_stacked;              // layers of a leading axis of the weights; 0 for none
  void* y;                          // [V*num_tokens, hidden]
  PlanOutputs plan;
  void* workspace;   // fused_workspace_bytes, 128-byte aligned, holding anything
  uint64_t* stamps;  // [kNumStamps], zero, or null
  FusedOptions options;
};

// Null, or why the op does not take these sizes and what would do.
const char* fused_error(const DomainShape& shape, int32_t ranks_per_device, DType dtype,
                        const FusedOptions& options);

// The engine that runs, never kAuto.
MoeEngine fused_engine(const DomainShape& shape, DType dtype, const FusedOptions& options);

// Loads every kernel on the current device, so that no launch does it while another kernel waits
// for a peer, and finds the driver's entry points. Once a device, before the first launch.
cudaError_t prepare_fused();

// The same for every options but `engine` and `tile_rows`.
size_t fused_workspace_bytes(const DomainShape& shape, int32_t ranks_per_device, int32_t num_tokens,
                             int32_t max_routes_per_rank, DType dtype, const FusedOptions& options);

// Enqueues the op; allocates nothing and waits for nothing. The plan of the call, which COPY makes,
// must be complete in this stream. cudaErrorInvalidValue where fused_error has an answer or the
// driver refuses the addresses.
cudaError_t launch_fused(const FusedLaunch& launch, cudaStream_t stream);

}  // namespace iser::cuda
