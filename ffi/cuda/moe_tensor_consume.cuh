// What warps that multiply do whatever they multiply: take tiles, free steps, store rows.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_activation.cuh"
#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_tensor_shared.cuh"

namespace iser::cuda {

template <class Tiles, int kCluster>
class TileConsumer {
 public:
  using Shared = TensorShared<Tiles>;

  __device__ TileConsumer(const MoeContext& context, Shared& shared)
      : context_(context),
        shared_(shared),
        lane_(threadIdx.x % 32),
        group_(threadIdx.x / 128 - 1),
        warp_(threadIdx.x / 32 % 4),
        staging_(shared.staging[4 * group_ + warp_]) {}

 protected:
  __device__ void begin_timing() const {
    if (is_timed()) shared_.since = clocks_now();
  }

  // Waits for the next announced tile; false at the end.
  __device__ bool has_tile() const {
    wait_announced<kCluster>(&shared_.tile_full[tiles_.at()], tiles_.parity());
    if (is_timed()) stamp_since(MoeStamp::kIdle);
    return tile().gemm != Gemm::kNone;
  }

  // Read when it is wanted: accumulators leave no registers to keep it in.
  __device__ const Tile& tile() const { return shared_.tiles[tiles_.at()]; }

  // The warp's share of the tile is stored.
  __device__ void finish_tile(bool is_inner) const {
    __syncwarp();
    if (lane_ == 0) mbarrier_arrive(&shared_.tile_stored[tiles_.at()]);
    if (is_timed()) stamp_since(is_inner ? MoeStamp::kGemmInner : MoeStamp::kGemmHidden);
  }

  // To whoever loads into this CTA.
  __device__ void release_step(int32_t step) const {
    if (kCluster == 1) {
      if (lane_ == 0) mbarrier_arrive(&shared_.empty[step]);
    } else {
      // Beside FP8's sums and any epilogue no register is left for the lane.
      const int32_t lane = Tiles::kIsAny && Tiles::kIsFp8 ? fresh_lane() : lane_;
      if (lane < kCluster) peer_arrive(peer_address(&shared_.empty[step], lane));
    }
  }

  // Where the result of row `first + lane % 16` of the tile goes; null past its rows and for h.
  __device__ uint8_t* row_target(const Tile& tile, int32_t first) const {
    const int32_t row = first + lane_ % kWarpRows;
    if (tile.gemm == Gemm::kInner || row >= tile.num_rows) return nullptr;
    const int2* sources = reinterpret_cast<const int2*>(context_.tables().sources);
    const int2 source = __ldcg(sources + (tile.row + row) % context_.call.sizes.wave_rows);
    return context_.target({source.x, source.y});
  }

  __device__ static int32_t fresh_lane() {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread));
    return static_cast<int32_t>(thread % 32);
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

  // 16 staged rows of `kWords` words to where lanes 16 * i and on say they go, as many columns as
  // there are.
  template <int kWords, int kStride>
  __device__ void store_targets(int32_t i, uint8_t* target, int32_t lane, int32_t columns) const {
#pragma unroll
    for (int round = 0; round < kWarpRows * kWords / 32; ++round) {
      const int32_t index = round * 32 + lane, row = index / kWords, word = index % kWords;
      uint8_t* to = reinterpret_cast<uint8_t*>(__shfl_sync(
          kAllLanes, reinterpret_cast<unsigned long long>(target), kWarpRows * i + row));
      if (to != nullptr && word * 8 < columns) {
        *reinterpret_cast<uint4*>(to + word * 16) =
            *reinterpret_cast<const uint4*>(staging_ + row * kStride + word * 16);
      }
    }
    __syncwarp();
  }

  // Calls `visit` with what makes h of gate and up.
  template <class Visit>
  __device__ void with_epilogue(const Visit& visit) const {
    const Activation& activation = context_.call.launch.shape.activation;
    if constexpr (Tiles::kIsAny) {
      with_activation(activation, visit);
    } else {
      visit(Silu(activation));
    }
  }

  // Of the lane's first two columns behind column `first` of the tile; others follow. Zeros where
  // the call has none.
  __device__ const float* tile_biases(int32_t first) const {
    return shared_.biases[tiles_.at()] + first + late_lane() % 4 * 2;
  }

  // Sums `kFirst` and on of each block, half of a thread's, begin as the biases of their columns:
  // nothing waits for them at the end, where they would have to wait for registers.
  template <int kFirst, int kBlocks, int kCount>
  __device__ static void start_half(const float* biases, float (&acc)[2][kCount]) {
#pragma unroll
    for (int j = 0; j < kCount / 2; j += 4) {
      const float2 bias = *reinterpret_cast<const float2*>(biases + j / 4 * 8);
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        acc[i][kFirst + j] = acc[i][kFirst + j + 2] = bias.x;
        acc[i][kFirst + j + 1] = acc[i][kFirst + j + 3] = bias.y;
      }
    }
  }

  // The first step, with which the tile's biases come, is there.
  __device__ void wait_for_biases() const {
    mbarrier_wait(&shared_.full[steps_.at], steps_.parity);
  }

  const MoeContext& context_;
  Shared& shared_;
  const int32_t lane_, group_, warp_;
  uint8_t* const staging_;
  RingAt<Tiles::kNumSteps> steps_;
  TileRing tiles_;

 private:
  __device__ bool is_timed() const {
    return context_.call.launch.stamps != nullptr && threadIdx.x == 128;
  }
  __device__ void stamp_since(MoeStamp stamp) const {
    const uint32_t now = clocks_now();
    add_to_stamp(context_.call, stamp, now - shared_.since);
    shared_.since = now;
  }
};

}  // namespace iser::cuda
