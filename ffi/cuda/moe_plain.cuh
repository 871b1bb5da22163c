// The plain engine: the same rows, tiles and gates on CUDA cores. Slow; it takes every size and
// dtype. Each output is one chain of fused multiply-adds in increasing k, as on the CPU.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "ffi/core/activation.h"
#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_pull.cuh"

namespace iser::cuda {

constexpr int kPlainTile = 64, kPlainDepth = 16;  // rows and columns of a tile, k of a step
constexpr int kPlainMathThreads = 256, kPlainThreads = kPlainMathThreads + 64;

struct PlainShared {
  float rows[kPlainDepth][kPlainTile + 4];
  float weights[2][kPlainDepth][kPlainTile + 4];
  Tile tile;
};

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
template <typename T>
__device__ inline T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}

// Those threads of the CTA that multiply.
__device__ inline void math_barrier() {
  asm volatile("bar.sync 1, %0;" ::"n"(kPlainMathThreads) : "memory");
}

template <typename T>
class PlainMultiplier {
 public:
  __device__ PlainMultiplier(const MoeContext& context, PlainShared& shared)
      : context_(context),
        shared_(shared),
        row_(threadIdx.x / 16 * 4),
        column_(threadIdx.x % 16 * 4) {}

  __device__ void run() {
    TileQueue queue(context_);
    TileGate gate{context_};
    for (;;) {
      if (threadIdx.x < 32) take(queue, gate);
      math_barrier();
      const Tile tile = shared_.tile;
      if (tile.gemm == Gemm::kNone) break;
      tile.gemm == Gemm::kInner ? compute_inner(tile) : compute_hidden(tile);
      math_barrier();
      if (threadIdx.x < 32) publish_tile(context_, tile);
    }
  }

 private:
  __device__ void take(TileQueue& queue, TileGate& gate) {
    const bool is_first = threadIdx.x == 0;
    const int32_t item = __shfl_sync(kAllLanes, is_first ? queue.claim() : 0, 0);
    Tile tile{Gemm::kNone};
    if (item < queue.num_items) tile = queue.find(item);
    if (!is_first) return;
    if (tile.gemm != Gemm::kNone && (has_failed(context_.table) || !gate.open(tile))) {
      tile.gemm = Gemm::kNone;
    }
    shared_.tile = tile;
  }

  // Adds the slot's biases of the tile's columns from `first` on, of which `columns` are there.
  __device__ void add_biases(const Tile& tile, int32_t plane, int32_t first, int32_t columns,
                             float (&acc)[4][4]) const {
    if (!context_.call.launch.shape.has_biases) return;
    const float* const biases =
        reinterpret_cast<const float*>(context_.plane(tile.slot, plane)) + first + column_;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (column_ + c >= columns) continue;
      const float bias = __ldcg(biases + c);
#pragma unroll
      for (int r = 0; r < 4; ++r) acc[r][c] += bias;
    }
  }

  // The plane of a slot's weights, 0 to 2.
  __device__ const T* weights(int32_t slot, int32_t plane) const {
    return reinterpret_cast<const T*>(context_.plane(slot, plane));
  }

  // 64 rows of `depth` columns, `count` of them there, to shared memory with k first; 0 elsewhere.
  __device__ void load(const T* from, int32_t depth, int32_t count, int32_t k,
                       float (&to)[kPlainDepth][kPlainTile + 4]) const {
    for (int32_t i = threadIdx.x; i < kPlainTile * kPlainDepth; i += kPlainMathThreads) {
      const int32_t row = i / kPlainDepth, column = i % kPlainDepth;
      const bool is_there = row < count && k + column < depth;
      // Not through L1: other SMs have written it.
      to[column][row] =
          is_there ? to_float(__ldcg(from + static_cast<size_t>(row) * depth + k + column)) : 0.0f;
    }
  }

  template <int kProducts>
  __device__ void multiply(const T* rows, int32_t num_rows, const T* const (&weights)[kProducts],
                           int32_t num_columns, int32_t depth, float (&acc)[kProducts][4][4]) {
    for (int32_t k = 0; k < depth; k += kPlainDepth) {
      load(rows, depth, num_rows, k, shared_.rows);
      for (int p = 0; p < kProducts; ++p) {
        load(weights[p], depth, num_columns, k, shared_.weights[p]);
      }
      math_barrier();
#pragma unroll
      for (int i = 0; i < kPlainDepth; ++i) {
#pragma unroll
        for (int p = 0; p < kProducts; ++p) {
#pragma unroll
          for (int r = 0; r < 4; ++r) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
              acc[p][r][c] = __fmaf_rn(shared_.rows[i][row_ + r],
                                       shared_.weights[p][i][column_ + c], acc[p][r][c]);
            }
          }
        }
      }
      math_barrier();
    }
  }

  __device__ void compute_inner(const Tile& tile) {
    const MoeSizes& sizes = context_.call.sizes;
    const MoeWorkspace workspace = context_.call.workspace();
    const int64_t held = workspace.held_row(context_.local_idx, tile.row);
    const int32_t first = tile.column * kPlainTile, columns = sizes.intermediate - first;
    const size_t skipped = static_cast<size_t>(first) * sizes.hidden;
    const T* const planes[2] = {weights(tile.slot, kGatePlane) + skipped,
                                weights(tile.slot, kUpPlane) + skipped};
    float acc[2][4][4] = {};
    multiply<2>(reinterpret_cast<const T*>(workspace.rows()) + held * sizes.hidden, tile.num_rows,
                planes, columns, sizes.hidden, acc);
    add_biases(tile, kGateBiasPlane, first, columns, acc[0]);
    add_biases(tile, kUpBiasPlane, first, columns, acc[1]);
    T* to = reinterpret_cast<T*>(workspace.inner()) + held * sizes.intermediate + first;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (row_ + r >= tile.num_rows || column_ + c >= columns) continue;
        const float h =
            apply_activation(context_.call.launch.shape.activation, acc[0][r][c], acc[1][r][c]);
        to[static_cast<int64_t>(row_ + r) * sizes.intermediate + column_ + c] = from_float<T>(h);
      }
    }
  }

  __device__ void compute_hidden(const Tile& tile) {
    const MoeSizes& sizes = context_.call.sizes;
    const MoeWorkspace workspace = context_.call.workspace();
    const int64_t held = workspace.held_row(context_.local_idx, tile.row);
    const int32_t first = tile.column * kPlainTile, columns = sizes.hidden - first;
    const T* const planes[1] = {weights(tile.slot, kDownPlane) +
                                static_cast<size_t>(first) * sizes.intermediate};
    float acc[1][4][4] = {};
    multiply<1>(reinterpret_cast<const T*>(workspace.inner()) + held * sizes.intermediate,
                tile.num_rows, planes, columns, sizes.intermediate, acc);
    add_biases(tile, kDownBiasPlane, first, columns, acc[0]);
    const int2* sources = reinterpret_cast<const int2*>(context_.tables().sources);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      if (row_ + r >= tile.num_rows) continue;
      const int2 source = __ldcg(sources + (tile.row + row_ + r) % sizes.wave_rows);
      T* to = reinterpret_cast<T*>(context_.target({source.x, source.y})) + first;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (column_ + c < columns) to[column_ + c] = from_float<T>(acc[0][r][c]);
      }
    }
  }

  const MoeContext& context_;
  PlainShared& shared_;
  const int32_t row_, column_;  // first of the thread's 4 x 4 outputs, in the tile
};

template <typename T>
__global__ void __launch_bounds__(kPlainThreads)
    plain_kernel(const __grid_constant__ MoeCall call) {
  __shared__ PlainShared shared;
  __shared__ bool is_wanted;
  const DeviceTable* table = find_table(call);
  if (table == nullptr) return;
  const MoeContext context{call, *table, static_cast<int32_t>(blockIdx.x)};
  if (threadIdx.x == 0) {
    is_wanted = context.may_work();
    stamp_ns(call, MoeStamp::kExpertsNs);
  }
  __syncthreads();
  if (!is_wanted || context.tables().head->num_items == 0) return;
  if (threadIdx.x < kPlainMathThreads) {
    PlainMultiplier<T>(context, shared).run();
  } else if (context.may_pull()) {
    pull_rows<false>(context, INT32_MAX);
  }
  if (threadIdx.x % 32 == 0) stamp_ns(call, MoeStamp::kTilesEndNs);
}

}  // namespace iser::cuda
