// The warps of the tensor engine that multiply and store FP8 tiles.
//
// A step is 128 columns of K, for which rows and weights have one scale each: its products are
// summed apart, in 64 registers, and then added to the tile's sums in f32 times both scales. Both
// warpgroups take all rows of the tile. In GEMM 1 each has 64 columns of gate and the same of up; h
// is scaled by its row's largest of the tile's 128 columns, which the two exchange.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_tensor_consume.cuh"

namespace iser::cuda {

// A warp of the two warpgroups that multiply.
template <class Tiles, int kCluster>
class Fp8Multiplier : TileConsumer<Tiles, kCluster> {
 public:
  using Base = TileConsumer<Tiles, kCluster>;
  using Base::Base;

  __device__ void run() {
    float acc[2][kFp8Acc];
    this->begin_timing();
    for (; this->has_tile(); tiles_.advance()) {
      uint8_t* const target = target_of(this->tile());
      multiply_tile(this->tile(), acc);
      const Tile tile = this->tile();
      const bool is_inner = tile.gemm == Gemm::kInner;
      if (is_inner) {
        store_inner(tile, acc);
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

  // Scales of the weights that the warpgroup's columns meet, by step.
  struct WeightScales {
    const float *first, *second;  // of the lower and of the upper half of the columns
  };

  // The warpgroup's first column of h.
  __device__ int32_t inner_column(const Tile& tile) const {
    return tile.column * Fp8Tiles::kInner + group_ * (Fp8Tiles::kInner / 2);
  }

  // First row of the warp's share of block i, within the tile.
  __device__ int32_t first_row(int32_t i) const { return i * kMmaRows + warp_ * kWarpRows; }

  __device__ uint8_t* target_of(const Tile& tile) const {
    uint8_t* const row = this->row_target(tile, first_row(lane_ / kWarpRows));
    return row == nullptr ? nullptr
                          : row + (tile.column * Fp8Tiles::kHidden + group_ * kFp8Columns) * 2;
  }

  __device__ const float* scales_of(const Tile& tile, int32_t which, int32_t block,
                                    int32_t depth) const {
    const size_t offset = context_.call.block.bundle.planes[which].scales_offset;
    return reinterpret_cast<const float*>(context_.plane(tile.slot, which) + offset) +
           static_cast<size_t>(block) * fp8::num_blocks(depth);
  }

  __device__ WeightScales weight_scales(const Tile& tile) const {
    const MoeSizes& sizes = context_.call.sizes;
    if (tile.gemm == Gemm::kInner) {
      // A cluster's second column may lie behind the last; what it computes is dropped.
      const int32_t block = at_most(tile.column, fp8::num_blocks(sizes.intermediate) - 1);
      return {scales_of(tile, kGatePlane, block, sizes.hidden),
              scales_of(tile, kUpPlane, block, sizes.hidden)};
    }
    const int32_t block = at_most(2 * tile.column + group_, fp8::num_blocks(sizes.hidden) - 1);
    const float* const scales = scales_of(tile, kDownPlane, block, sizes.intermediate);
    return {scales, scales};
  }

  __device__ void multiply_tile(const Tile& tile, float (&acc)[2][kFp8Acc]) {
    const MoeSizes& sizes = context_.call.sizes;
    const int32_t depth = tile.gemm == Gemm::kInner ? sizes.hidden : sizes.intermediate;
    const int32_t num_steps = Tiles::num_steps(depth);
    const WeightScales scales = weight_scales(tile);
    const int32_t shift = context_.call.workspace().held_row(context_.local_idx, tile.row) % 4;
    const bool is_full = __shfl_sync(kAllLanes, tile.num_rows > kMmaRows, 0);
    if (is_full) {
      multiply<2>(num_steps, shift, scales, acc);
    } else {
      multiply<1>(num_steps, shift, scales, acc);
    }
  }

  template <int kBlocks>
  __device__ void start_sums(float (&acc)[2][kFp8Acc]) const {
    if constexpr (Tiles::kIsAny) {
      this->wait_for_biases();
      const bool is_inner = this->tile().gemm == Gemm::kInner;
      constexpr int32_t kHalf = kFp8Columns / 2;
      const float* const biases = this->tile_biases(group_ * (is_inner ? kHalf : kFp8Columns));
      Base::template start_half<0, kBlocks>(biases, acc);
      Base::template start_half<kFp8Acc / 2, kBlocks>(
          biases + (is_inner ? Fp8Tiles::kInner : kHalf), acc);
    } else {
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
        for (int j = 0; j < kFp8Acc; ++j) acc[i][j] = 0.0f;
      }
    }
  }

  template <int kBlocks>
  __device__ void multiply(int32_t num_steps, int32_t shift, const WeightScales& scales,
                           float (&acc)[2][kFp8Acc]) {
    float first = __ldcg(scales.first), second = __ldcg(scales.second);
    start_sums<kBlocks>(acc);
    const int32_t row = shift + warp_ * kWarpRows + lane_ / 4;  // of the box of scales
    for (int32_t step = 0; step < num_steps; ++step) {
      const int32_t ahead = at_most(step + 1, num_steps - 1);
      const float next_first = __ldcg(scales.first + ahead);
      const float next_second = __ldcg(scales.second + ahead);
      mbarrier_wait(&shared_.full[steps_.at], steps_.parity);
      const uint8_t* operands = shared_.steps[steps_.at];
      const uint64_t rows = matrix_descriptor(operands);
      const uint64_t weights = matrix_descriptor(operands + Base::Shared::kRowsBytes +
                                                 group_ * kFp8Columns * kSwizzleRow);
      const float* const row_scales = shared_.scales[steps_.at] + row;
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        float part[kFp8Acc];
        const float low = row_scales[i * kMmaRows], high = row_scales[i * kMmaRows + 8];
        const float by[4] = {low * first, high * first, low * second, high * second};
        pin(part);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kSwizzleRow / kFp8Depth; ++k) {
          wgmma(part, rows + (i * kBlockBytes >> 4) + k * kDescriptorStep,
                weights + k * kDescriptorStep, k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(part);
        if (i + 1 == kBlocks) this->release_step(steps_.at);
#pragma unroll
        for (int j = 0; j < kFp8Acc; ++j) {
          acc[i][j] = __fmaf_rn(part[j], by[j / (kFp8Acc / 2) * 2 + j / 2 % 2], acc[i][j]);
        }
      }
      first = next_first;
      second = next_second;
      steps_.advance();
    }
  }

  // Of rows `lane / 4` and eight further on of the warp's share of block i; h replaces gate.
  template <class Act>
  __device__ static float2 make_inner(float (&acc)[kFp8Acc], const Act& act) {
    float2 most{0.0f, 0.0f};
#pragma unroll
    for (int j = 0; j < kFp8Acc / 2; ++j) {
      acc[j] = act(acc[j], acc[j + kFp8Acc / 2]);
      float& of_row = j / 2 % 2 == 0 ? most.x : most.y;
      of_row = fmaxf(of_row, fabsf(acc[j]));
    }
#pragma unroll
    for (int d = 1; d < 4; d *= 2) {
      most.x = fmaxf(most.x, __shfl_xor_sync(kAllLanes, most.x, d));
      most.y = fmaxf(most.y, __shfl_xor_sync(kAllLanes, most.y, d));
    }
    return most;
  }

  __device__ float2 make_inner(const Tile& tile, float (&acc)[kFp8Acc]) const {
    float2 most{0.0f, 0.0f};
    if constexpr (Tiles::kIsAny) {
      // Where there are no columns there are no biases, and what they would make is no h.
      if (inner_column(tile) >= context_.call.sizes.intermediate) return most;
    }
    this->with_epilogue([&](const auto& act) { most = make_inner(acc, act); });
    return most;
  }

  __device__ void store_inner(const Tile& tile, float (&acc)[2][kFp8Acc]) {
    const int32_t num_blocks = tile.num_rows > kMmaRows ? 2 : 1;
    const int32_t row = warp_ * kWarpRows + lane_ / 4;
    // Double, so that the next tile's do not meet reads of this one's.
    float(&amax)[2][Fp8Tiles::kScales] = shared_.amax[tiles_.count & 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= num_blocks) break;
      const float2 most = make_inner(tile, acc[i]);
      if (lane_ % 4 == 0) {
        amax[group_][i * kMmaRows + row] = most.x;
        amax[group_][i * kMmaRows + row + 8] = most.y;
      }
    }
    sync_multipliers();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (i >= num_blocks || tile.num_rows <= first_row(i)) break;
      const int32_t at = i * kMmaRows + row;
      const fp8::Scale low = fp8::Scale::of(fmaxf(amax[0][at], amax[1][at]));
      const fp8::Scale high = fp8::Scale::of(fmaxf(amax[0][at + 8], amax[1][at + 8]));
      store_scales(tile, at, low.down, high.down);
      store_rows(tile, i, acc[i], low.up, high.up);
    }
  }

  __device__ void store_scales(const Tile& tile, int32_t row, float low, float high) const {
    if (group_ != 0 || lane_ % 4 != 0) return;
    const MoeSizes& sizes = context_.call.sizes;
    if (tile.column >= sizes.inner_tiles()) return;
    const MoeWorkspace workspace = context_.call.workspace();
    float* to = workspace.inner_scales(tile.column) +
                workspace.held_row(context_.local_idx, tile.row) + row;
    if (row < tile.num_rows) to[0] = low;
    if (row + 8 < tile.num_rows) to[8] = high;
  }

  __device__ void store_rows(const Tile& tile, int32_t i, const float (&h)[kFp8Acc], float low,
                             float high) const {
    const int32_t valid = tile.num_rows - first_row(i), lane = this->late_lane();
    uint8_t* const staged = staging_ + lane / 4 * Fp8Tiles::kInnerStride + lane % 4 * 2;
#pragma unroll
    for (int c = 0; c < kFp8Acc / 8; ++c) {
      const uint32_t first = pack_e4m3(h[4 * c] * low, h[4 * c + 1] * low);
      const uint32_t second = pack_e4m3(h[4 * c + 2] * high, h[4 * c + 3] * high);
      *reinterpret_cast<uint16_t*>(staged + 8 * c) = static_cast<uint16_t>(first);
      *reinterpret_cast<uint16_t*>(staged + 8 * Fp8Tiles::kInnerStride + 8 * c) =
          static_cast<uint16_t>(second);
    }
    __syncwarp();
    const MoeCall& call = context_.call;
    const MoeWorkspace workspace = call.workspace();
    const size_t row_bytes = call.sizes.intermediate;
    const int32_t column = inner_column(tile);
    uint8_t* to = workspace.inner() +
                  (workspace.held_row(context_.local_idx, tile.row) + first_row(i)) * row_bytes +
                  column;
    constexpr int kWords = Fp8Tiles::kInner / 2 / 16;
#pragma unroll
    for (int round = 0; round < kWarpRows * kWords / 32; ++round) {
      const int32_t index = round * 32 + lane, row = index / kWords, word = index % kWords;
      if (row < valid && column < call.sizes.intermediate) {
        *reinterpret_cast<uint4*>(to + row * row_bytes + word * 16) =
            *reinterpret_cast<const uint4*>(staging_ + row * Fp8Tiles::kInnerStride + word * 16);
      }
    }
    __syncwarp();
  }

  // 64 columns at a time.
  __device__ void store_hidden(const Tile& tile, int32_t i, const float (&acc)[kFp8Acc],
                               uint8_t* target) const {
    if (tile.num_rows <= first_row(i)) return;
    const int32_t lane = this->late_lane();
    uint8_t* const staged = this->staged_row(lane, Fp8Tiles::kHiddenStride);
    const int32_t columns =
        context_.call.sizes.hidden - tile.column * Fp8Tiles::kHidden - group_ * kFp8Columns;
    constexpr int kStaged = kFp8Columns / 2, kWords = kStaged / 8;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int c = 0; c < kStaged / 16; ++c) {
        const float* const at = acc + half * (kFp8Acc / 2) + 8 * c;
        uint32_t packed[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) packed[p] = pack_bf16(at[2 * p], at[2 * p + 1]);
        store_matrices(staged + 32 * c, packed[0], packed[1], packed[2], packed[3]);
      }
      __syncwarp();
      this->template store_targets<kWords, Fp8Tiles::kHiddenStride>(
          i, target == nullptr ? nullptr : target + half * kStaged * 2, lane,
          columns - half * kStaged);
    }
  }

  // All warps that multiply.
  __device__ static void sync_multipliers() {
    asm volatile("bar.sync 1, %0;" ::"n"(kMmaWarps * 32) : "memory");
  }
};

}  // namespace iser::cuda
