// What a CTA of the tensor engine keeps in shared memory, and how its roles go round in it.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_mma.cuh"
#include "ffi/cuda/moe_schedule.cuh"

namespace iser::cuda {

constexpr int kTensorThreads = 384;
constexpr int kNumSteps = 3;  // of the pipeline
constexpr int kNumTiles = 4;  // announced and not yet published
constexpr int kMmaWarps = 8, kWarpRows = 16;
constexpr int kTensorRows = 256;                // most of a tile
constexpr int kInnerColumns = kMmaColumns / 2;  // of gate and of up
constexpr int kBlockBytes = kMmaRows * kSwizzleRow;
constexpr int kRowsBytes = kTensorRows * kSwizzleRow;
constexpr int kWeightBytes = kMmaColumns * kSwizzleRow;
constexpr int kStepBytes = kRowsBytes + kWeightBytes;
// Staged rows begin 16 bytes further on in the banks each, so that stmatrix meets no conflicts.
constexpr int kInnerStride = 2 * kInnerColumns + 16, kHiddenStride = 2 * kMmaColumns + 16;
constexpr int kStagingBytes = kWarpRows * kHiddenStride;
constexpr int kLoaderRegisters = 56, kMmaRegisters = 224;

struct alignas(1024) TensorShared {
  uint8_t steps[kNumSteps][kStepBytes];  // rows, then weights
  uint8_t staging[kMmaWarps][kStagingBytes];
  uint64_t full[kNumSteps];   // loaded
  uint64_t empty[kNumSteps];  // multiplied, by every warp of the cluster
  uint64_t tile_full[kNumTiles];
  uint64_t tile_stored[kNumTiles];  // by every warp
  uint64_t tile_empty[kNumTiles];   // of the cluster's first CTA: published by all
  Tile tiles[kNumTiles];
  Tile next;  // found while the last is loaded
  uint32_t is_wanted;
  uint32_t since;  // when what is being timed began
};
constexpr int kTileWords = sizeof(Tile) / sizeof(uint32_t);

constexpr size_t kTensorSharedBytes = sizeof(TensorShared) + 1024;  // to begin at a multiple
static_assert(kTensorSharedBytes <= 227 * 1024, "exceeds the shared memory of a CTA");
static_assert(kStepBytes % 1024 == 0 && kInnerColumns * kSwizzleRow % 1024 == 0,
              "swizzled boxes begin at multiples of 1,024 bytes");

// Which of `kCount` a role is at, and the parity of its round.
template <int kCount>
struct RingAt {
  int32_t at = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++at == kCount) {
      at = 0;
      parity ^= 1;
    }
  }
};

// The same for announced tiles, in one register.
struct TileRing {
  uint32_t count = 0;

  __device__ int32_t at() const { return count % kNumTiles; }
  __device__ uint32_t parity() const { return count / kNumTiles & 1; }
  __device__ void advance() { ++count; }
};
static_assert((kNumTiles & (kNumTiles - 1)) == 0, "rounds are counted in bits");

template <int kCluster>
__device__ inline void init_barriers(TensorShared& shared) {
  for (int i = 0; i < kNumSteps; ++i) {
    mbarrier_init(&shared.full[i], 1);
    mbarrier_init(&shared.empty[i], kCluster * kMmaWarps);
  }
  for (int i = 0; i < kNumTiles; ++i) {
    mbarrier_init(&shared.tile_full[i], 1);
    mbarrier_init(&shared.tile_stored[i], kMmaWarps);
    mbarrier_init(&shared.tile_empty[i], kCluster);
  }
  fence_mbarrier_init();
}

// For a tile, which the other CTA may have written.
template <int kCluster>
__device__ inline void wait_announced(uint64_t* barrier, uint32_t parity) {
  if (kCluster == 1) {
    mbarrier_wait(barrier, parity);
  } else {
    mbarrier_wait_cluster(barrier, parity);
  }
}

}  // namespace iser::cuda
