// The warps of the tensor engine that multiply and store.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_tensor_shared.cuh"

namespace iser::cuda {

// A warp of the two warpgroups that multiply.
template <int kCluster>
class TileMultiplier {
 public:
  __device__ TileMultiplier(const MoeContext& context, TensorShared& shared)
      : context_(context),
        shared_(shared),
        lane_(threadIdx.x % 32),
        group_(threadIdx.x / 128 - 1),
        warp_(threadIdx.x / 32 % 4),
        staging_(shared.staging[4 * group_ + warp_]) {}

  __device__ void run() {
    float acc[2][kNumAcc];
    if (is_timed()) shared_.since = clocks_now();
    for (;; tiles_.advance()) {
      wait_announced<kCluster>(&shared_.tile_full[tiles_.at()], tiles_.parity());
      if (is_timed()) stamp_since(MoeStamp::kIdle);
      if (shared_.tiles[tiles_.at()].gemm == Gemm::kNone) break;
      uint8_t* const target = target_of(shared_.tiles[tiles_.at()]);
      multiply_tile(shared_.tiles[tiles_.at()], acc);
      // Read again: the accumulators leave no registers to keep it in.
      const Tile tile = shared_.tiles[tiles_.at()];
      const bool is_inner = tile.gemm == Gemm::kInner;
      // Block i of this warpgroup is block group + 2 * i of the tile.
      if (is_inner) {
        store_inner(tile, 0, acc[0]);
        store_inner(tile, 1, acc[1]);
      } else {
        store_hidden(tile, 0, acc[0], target);
        store_hidden(tile, 1, acc[1], target);
      }
      __syncwarp();
      if (lane_ == 0) mbarrier_arrive(&shared_.tile_stored[tiles_.at()]);
      if (is_timed()) stamp_since(is_inner ? MoeStamp::kGemmInner : MoeStamp::kGemmHidden);
    }
  }

 private:
  __device__ bool is_timed() const {
    return context_.call.launch.stamps != nullptr && threadIdx.x == 128;
  }
  __device__ void stamp_since(MoeStamp stamp) const {
    const uint32_t now = clocks_now();
    stamp_clocks(context_.call, stamp, now - shared_.since);
    shared_.since = now;
  }

  // First row of the warp's share of its block i, within the tile.
  __device__ int32_t first_row(int32_t i) const {
    return (group_ + 2 * i) * kMmaRows + warp_ * kWarpRows;
  }

  // Lane l: where row l % 16 of the warp's share of block l / 16 goes, null past the tile's rows
  // and for h.
  __device__ uint8_t* target_of(const Tile& tile) const {
    if (tile.gemm == Gemm::kInner) return nullptr;
    const int32_t row = first_row(lane_ / kWarpRows) + lane_ % kWarpRows;
    if (row >= tile.num_rows) return nullptr;
    const int2* sources = reinterpret_cast<const int2*>(context_.tables().sources);
    const int2 source = __ldcg(sources + (tile.row + row) % context_.call.sizes.wave_rows);
    return context_.target({source.x, source.y}) + tile.column * kMmaColumns * 2;
  }

  __device__ void multiply_tile(const Tile& tile, float (&acc)[2][kNumAcc]) {
    const MoeSizes& sizes = context_.call.sizes;
    const int32_t depth = tile.gemm == Gemm::kInner ? sizes.hidden : sizes.intermediate;
    const int32_t num_steps = depth / kStepColumns;
    const int32_t blocks =
        __shfl_sync(kAllLanes, ceil_div(tile.num_rows, kMmaRows) + 1 - group_, 0) / 2;
    if (blocks == 2) {
      multiply<2>(num_steps, acc);
    } else if (blocks == 1) {
      multiply<1>(num_steps, acc);
    } else {
      multiply<0>(num_steps, acc);
    }
  }

  template <int kBlocks>
  __device__ void multiply(int32_t num_steps, float (&acc)[2][kNumAcc]) {
    int32_t before = 0;  // the step whose products may still be under way
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    for (int32_t step = 0; step < num_steps; ++step) {
      mbarrier_wait(&shared_.full[steps_.at], steps_.parity);
      const uint8_t* operands = shared_.steps[steps_.at];
      const uint64_t rows = matrix_descriptor(operands + group_ * kBlockBytes);
      const uint64_t weights = matrix_descriptor(operands + kRowsBytes);
      if (kBlocks > 0) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kStepColumns / kMmaDepth; ++k) {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            wgmma(acc[i], rows + (2 * i * kBlockBytes >> 4) + k * kDescriptorStep,
                  weights + k * kDescriptorStep, k > 0 ? 1 : step);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
      }
      if (step > 0) release_step(before);
      before = steps_.at;
      steps_.advance();
    }
    if (kBlocks > 0) wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    release_step(before);
  }

  // To whoever loads into this CTA.
  __device__ void release_step(int32_t step) {
    if (kCluster == 1) {
      if (lane_ == 0) mbarrier_arrive(&shared_.empty[step]);
    } else if (lane_ < kCluster) {
      peer_arrive(peer_address(&shared_.empty[step], lane_));
    }
  }

  // The lane, in a way that the compiler cannot compute with ahead of the tile: the accumulators
  // leave no registers for what it would keep.
  __device__ int32_t late_lane() const {
    int32_t lane = lane_;
    asm volatile("" : "+r"(lane));
    return lane;
  }

  // Where the lane's row begins in 16 x 16 values that stmatrix stages.
  __device__ uint8_t* staged_row(int32_t lane, int32_t stride) const {
    return staging_ + lane % 16 * stride + lane / 16 * 16;
  }

  // h = silu(gate) * up; accumulators hold gate's columns, then as many of up.
  __device__ void store_inner(const Tile& tile, int32_t i, const float (&acc)[kNumAcc]) const {
    const int32_t valid = tile.num_rows - first_row(i), lane = late_lane();
    if (valid <= 0) return;
    uint8_t* const staged = staged_row(lane, kInnerStride);
#pragma unroll
    for (int c = 0; c < kInnerColumns / 16; ++c) {
      uint32_t packed[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int at = 8 * c + 2 * p;
        packed[p] = pack_bf16(swiglu(acc[at], acc[at + kNumAcc / 2]),
                              swiglu(acc[at + 1], acc[at + 1 + kNumAcc / 2]));
      }
      store_matrices(staged + 32 * c, packed[0], packed[1], packed[2], packed[3]);
    }
    __syncwarp();
    const MoeCall& call = context_.call;
    const MoeWorkspace workspace = call.workspace();
    const size_t row_bytes = static_cast<size_t>(call.sizes.intermediate) * 2;
    const int32_t column = tile.column * kInnerColumns;
    uint8_t* to = workspace.inner() +
                  (workspace.held_row(context_.local_idx, tile.row) + first_row(i)) * row_bytes +
                  column * 2;
    constexpr int kWords = kInnerColumns / 8;  // of a row, 16 bytes each
#pragma unroll
    for (int round = 0; round < kWarpRows * kWords / 32; ++round) {
      const int32_t index = round * 32 + lane;
      const int32_t row = index / kWords, word = index % kWords;
      if (row < valid && column + word * 8 < call.sizes.intermediate) {
        *reinterpret_cast<uint4*>(to + row * row_bytes + word * 16) =
            *reinterpret_cast<const uint4*>(staging_ + row * kInnerStride + word * 16);
      }
    }
    __syncwarp();
  }

  __device__ void store_hidden(const Tile& tile, int32_t i, const float (&acc)[kNumAcc],
                               uint8_t* target) const {
    if (tile.num_rows <= first_row(i)) return;
    const int32_t lane = late_lane();
    uint8_t* const staged = staged_row(lane, kHiddenStride);
#pragma unroll
    for (int c = 0; c < kMmaColumns / 16; ++c) {
      uint32_t packed[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        packed[p] = pack_bf16(acc[8 * c + 2 * p], acc[8 * c + 2 * p + 1]);
      }
      store_matrices(staged + 32 * c, packed[0], packed[1], packed[2], packed[3]);
    }
    __syncwarp();
    const int32_t columns = context_.call.sizes.hidden - tile.column * kMmaColumns;
    constexpr int kWords = kMmaColumns / 8;
#pragma unroll
    for (int round = 0; round < kWarpRows * kWords / 32; ++round) {
      const int32_t index = round * 32 + lane, row = index / kWords, word = index % kWords;
      uint8_t* to = reinterpret_cast<uint8_t*>(__shfl_sync(
          kAllLanes, reinterpret_cast<unsigned long long>(target), kWarpRows * i + row));
      if (to != nullptr && word * 8 < columns) {
        *reinterpret_cast<uint4*>(to + word * 16) =
            *reinterpret_cast<const uint4*>(staging_ + row * kHiddenStride + word * 16);
      }
    }
    __syncwarp();
  }

  __device__ static float swiglu(float gate, float up) {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  }

  const MoeContext& context_;
  TensorShared& shared_;
  const int32_t lane_, group_, warp_;
  uint8_t* const staging_;
  RingAt<kNumSteps> steps_;
  TileRing tiles_;
};

}  // namespace iser::cuda
