// The warps of the tensor engine that multiply and store bf16 tiles. A tile's blocks of 64 rows
// alternate between the two warpgroups.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_tensor_consume.cuh"

namespace iser::cuda {

// A warp of the two warpgroups that multiply.
template <class Tiles, int kCluster>
class TileMultiplier : TileConsumer<Tiles, kCluster> {
 public:
  using Base = TileConsumer<Tiles, kCluster>;
  using Base::Base;

  __device__ void run() {
    float acc[2][kNumAcc];
    this->begin_timing();
    for (; this->has_tile(); tiles_.advance()) {
      uint8_t* const target = target_of(this->tile());
      multiply_tile(this->tile(), acc);
      const Tile tile = this->tile();
      const bool is_inner = tile.gemm == Gemm::kInner;
      // Block i of this warpgroup is block group + 2 * i of the tile.
      if (is_inner) {
        store_inner(tile, 0, acc[0]);
        store_inner(tile, 1, acc[1]);
      } else {
        store_hidden(tile, 0, acc[0], target);
        store_hidden(tile, 1, acc[1], target);
      }
      this->finish_tile(is_inner);
    }
  }

 private:
  using Base::context_;
  using Base::group_;
  using Base::lane_;
  using Base::shared_;
  using Base::staging_;
  using Base::steps_;
  using Base::tiles_;
  using Base::warp_;

  // First row of the warp's share of its block i, within the tile.
  __device__ int32_t first_row(int32_t i) const {
    return (group_ + 2 * i) * kMmaRows + warp_ * kWarpRows;
  }

  // Lane l: where row l % 16 of the warp's share of block l / 16 goes, null past the tile's rows
  // and for h.
  __device__ uint8_t* target_of(const Tile& tile) const {
    uint8_t* const row = this->row_target(tile, first_row(lane_ / kWarpRows));
    return row == nullptr ? nullptr : row + tile.column * Bf16Tiles::kHidden * 2;
  }

  __device__ void multiply_tile(const Tile& tile, float (&acc)[2][kNumAcc]) {
    const MoeSizes& sizes = context_.call.sizes;
    const int32_t depth = tile.gemm == Gemm::kInner ? sizes.hidden : sizes.intermediate;
    const int32_t num_steps = Tiles::num_steps(depth);
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
    if constexpr (Tiles::kIsAny && kBlocks > 0) {
      this->wait_for_biases();
      const float* const biases = this->tile_biases(0);
      Base::template start_half<0, kBlocks>(biases, acc);
      Base::template start_half<kNumAcc / 2, kBlocks>(biases + kMmaColumns / 2, acc);
    }
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    for (int32_t step = 0; step < num_steps; ++step) {
      mbarrier_wait(&shared_.full[steps_.at], steps_.parity);
      const uint8_t* operands = shared_.steps[steps_.at];
      const uint64_t rows = matrix_descriptor(operands + group_ * kBlockBytes);
      const uint64_t weights = matrix_descriptor(operands + Base::Shared::kRowsBytes);
      if (kBlocks > 0) {
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < Bf16Tiles::kStepColumns / kMmaDepth; ++k) {
#pragma unroll
          for (int i = 0; i < kBlocks; ++i) {
            wgmma(acc[i], rows + (2 * i * kBlockBytes >> 4) + k * kDescriptorStep,
                  weights + k * kDescriptorStep, Tiles::kIsAny || k > 0 ? 1 : step);
          }
        }
        wgmma_commit();
        wgmma_wait<1>();
      }
      if (step > 0) this->release_step(before);
      before = steps_.at;
      steps_.advance();
    }
    if (kBlocks > 0) wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    this->release_step(before);
  }

  // h of 16 columns at a time; accumulators hold gate's columns, then as many of up.
  template <class Act>
  __device__ static void stage_inner(const float (&acc)[kNumAcc], uint8_t* staged, const Act& act) {
#pragma unroll
    for (int c = 0; c < Bf16Tiles::kInner / 16; ++c) {
      uint32_t packed[4];
#pragma unroll
      for (int p = 0; p < 4; ++p) {
        const int at = 8 * c + 2 * p;
        packed[p] = pack_bf16(act(acc[at], acc[at + kNumAcc / 2]),
                              act(acc[at + 1], acc[at + 1 + kNumAcc / 2]));
      }
      store_matrices(staged + 32 * c, packed[0], packed[1], packed[2], packed[3]);
    }
  }

  __device__ void store_inner(const Tile& tile, int32_t i, const float (&acc)[kNumAcc]) const {
    const int32_t valid = tile.num_rows - first_row(i), lane = this->late_lane();
    if (valid <= 0) return;
    uint8_t* const staged = this->staged_row(lane, Bf16Tiles::kInnerStride);
    this->with_epilogue([&](const auto& act) { stage_inner(acc, staged, act); });
    __syncwarp();
    const MoeCall& call = context_.call;
    const MoeWorkspace workspace = call.workspace();
    const size_t row_bytes = static_cast<size_t>(call.sizes.intermediate) * 2;
    const int32_t column = tile.column * Bf16Tiles::kInner;
    uint8_t* to = workspace.inner() +
                  (workspace.held_row(context_.local_idx, tile.row) + first_row(i)) * row_bytes +
                  column * 2;
    constexpr int kWords = Bf16Tiles::kInner / 8;  // of a row, 16 bytes each
#pragma unroll
    for (int round = 0; round < kWarpRows * kWords / 32; ++round) {
      const int32_t index = round * 32 + lane;
      const int32_t row = index / kWords, word = index % kWords;
      if (row < valid && column + word * 8 < call.sizes.intermediate) {
        *reinterpret_cast<uint4*>(to + row * row_bytes + word * 16) =
            *reinterpret_cast<const uint4*>(staging_ + row * Bf16Tiles::kInnerStride + word * 16);
      }
    }
    __syncwarp();
  }

  __device__ void store_hidden(const Tile& tile, int32_t i, const float (&acc)[kNumAcc],
                               uint8_t* target) const {
    if (tile.num_rows <= first_row(i)) return;
    const int32_t lane = this->late_lane();
    uint8_t* const staged = this->staged_row(lane, Bf16Tiles::kHiddenStride);
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
    this->template store_targets<kMmaColumns / 8, Bf16Tiles::kHiddenStride>(i, target, lane,
                                                                            columns);
  }
};

}  // namespace iser::cuda
