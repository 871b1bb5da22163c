// What a CTA of the tensor engine keeps in shared memory, and how its roles go round in it.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_mma.cuh"
#include "ffi/cuda/moe_schedule.cuh"

namespace iser::cuda {

constexpr int kTensorThreads = 384;
constexpr int kNumTiles = 4;  // announced and not yet published
constexpr int kMmaWarps = 8, kWarpRows = 16;
constexpr int kBlockBytes = kMmaRows * kSwizzleRow;
constexpr int kLoaderRegisters = 56, kMmaRegisters = 224;

// What is done to the sums of a tile. SiLU without biases has kernels of its own, to which the rest
// costs nothing.
enum class Epilogue : int32_t {
  kSilu = 0,
  kAny = 1,  // any activation; biases, or zeros
};

// Tiles of bf16: the two warpgroups take turns with blocks of 64 rows, each with all columns.
struct Bf16Tiles {
  static constexpr bool kIsFp8 = false;
  static constexpr int kNumSteps = 3;  // of the pipeline
  static constexpr int kStepColumns = kSwizzleRow / 2;
  static constexpr int kRows = 256;                               // most of a tile
  static constexpr int kInner = kMmaColumns / 2;                  // columns of h: of gate and of up
  static constexpr int kHidden = kMmaColumns;                     // of y
  static constexpr int kWeightRows = kMmaColumns;                 // loaded in a step
  static constexpr int kInnerBox = kInner, kHiddenBox = kHidden;  // rows of weights that TMA loads
  static constexpr int kScaleBox = 4, kScales = 4;                // none; for the arrays' sake
  // Staged rows begin 16 bytes further on in the banks each, so that stmatrix meets no conflicts.
  static constexpr int kInnerStride = 2 * kInner + 16, kHiddenStride = 2 * kHidden + 16;
  static constexpr int kStagingBytes = kWarpRows * kHiddenStride;
};

// Tiles of FP8: both warpgroups take all rows, each half of the columns; a step is a block of
// scales.
struct Fp8Tiles {
  static constexpr bool kIsFp8 = true;
  static constexpr int kNumSteps = 4;
  static constexpr int kStepColumns = kSwizzleRow;
  static constexpr int kRows = 128;
  static constexpr int kInner = fp8::kBlock;
  static constexpr int kHidden = 2 * kFp8Columns;
  static constexpr int kWeightRows = 2 * kFp8Columns;
  static constexpr int kInnerBox = 64, kHiddenBox = 64;
  // TMA begins at multiples of 16 bytes: the first row's scale is one of the box's first four.
  static constexpr int kScaleBox = kRows + 4, kScales = 160;
  static constexpr int kInnerStride = kInner / 2 + 16;    // bytes of half a row of h
  static constexpr int kHiddenStride = kFp8Columns + 16;  // of 64 columns of y
  static constexpr int kStagingBytes = kWarpRows * kHiddenStride;
};

template <class Shape, Epilogue kWhich>
struct TilesWith : Shape {
  // The last one's columns behind the depth are zero in both operands: TMA fills them.
  __device__ static int32_t num_steps(int32_t depth) {
    return ceil_div(depth, Shape::kStepColumns);
  }
  static constexpr bool kIsAny = kWhich == Epilogue::kAny;
  static constexpr int kBiases = kIsAny ? Shape::kWeightRows : 4;  // of a tile; at least one word
};

template <class Tiles>
struct alignas(1024) TensorShared {
  static constexpr int kRowsBytes = Tiles::kRows * kSwizzleRow;
  static constexpr int kWeightBytes = Tiles::kWeightRows * kSwizzleRow;
  static constexpr int kStepBytes = kRowsBytes + kWeightBytes;
  static_assert(kStepBytes % 1024 == 0 && Tiles::kInnerBox * kSwizzleRow % 1024 == 0 &&
                    Tiles::kHiddenBox * kSwizzleRow % 1024 == 0,
                "swizzled boxes begin at multiples of 1,024 bytes");

  uint8_t steps[Tiles::kNumSteps][kStepBytes];                  // rows, then weights
  alignas(128) float scales[Tiles::kNumSteps][Tiles::kScales];  // of the rows
  float amax[2][2][Tiles::kScales];  // of rows of h: by parity of the tile and warpgroup
  alignas(16) uint8_t staging[kMmaWarps][Tiles::kStagingBytes];
  uint64_t full[Tiles::kNumSteps];   // loaded
  uint64_t empty[Tiles::kNumSteps];  // multiplied, by every warp of the cluster
  uint64_t tile_full[kNumTiles];
  uint64_t tile_stored[kNumTiles];  // by every warp
  uint64_t tile_empty[kNumTiles];   // of the cluster's first CTA: published by all
  Tile tiles[kNumTiles];
  Tile next;  // found while the last is loaded
  uint32_t is_wanted;
  uint32_t since;  // when what is being timed began
  // By announced tile: of gate's columns and then up's, or of down's. Those of columns that are not
  // there hold what was there before.
  alignas(16) float biases[Tiles::kIsAny ? kNumTiles : 1][Tiles::kBiases];
};
constexpr int kTileWords = sizeof(Tile) / sizeof(uint32_t);

template <class Tiles>
constexpr size_t kTensorSharedBytes = sizeof(TensorShared<Tiles>) + 1024;  // to begin at a multiple
static_assert(kTensorSharedBytes<TilesWith<Bf16Tiles, Epilogue::kAny>> <= 227 * 1024 &&
                  kTensorSharedBytes<TilesWith<Fp8Tiles, Epilogue::kAny>> <= 227 * 1024,
              "exceeds the shared memory of a CTA");

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

template <class Tiles, int kCluster>
__device__ inline void init_barriers(TensorShared<Tiles>& shared) {
  for (int i = 0; i < Tiles::kNumSteps; ++i) {
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
