// The tensor engine: tiles of bf16 (moe_tensor_multiply.cuh) or FP8 (moe_fp8_multiply.cuh) by
// wgmma, operands by TMA.
//
// A CTA has three warpgroups. In the first, one warp takes tiles and loads their operands, one
// publishes tiles that have been stored, two pull rows. The other two multiply. Every block of 64
// rows is a chain of the same products in increasing k, whatever the tile, so that a row's bits
// depend on the row and the weights alone.
//
// In clusters of two CTAs the pair takes tiles of the same rows and neighbouring columns: each
// loads half of the rows' blocks into both, so that less comes from L2. The first CTA takes tiles
// for both.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_fp8_multiply.cuh"
#include "ffi/cuda/moe_maps.cuh"
#include "ffi/cuda/moe_pull.cuh"
#include "ffi/cuda/moe_tensor_load.cuh"
#include "ffi/cuda/moe_tensor_multiply.cuh"
#include "ffi/cuda/moe_tensor_shared.cuh"

namespace iser::cuda {

// One warp. Consumers go on to the next tile while their stores are on their way.
template <class Tiles, int kCluster>
__device__ inline void publish_tiles(const MoeContext& context, TensorShared<Tiles>& shared) {
  for (TileRing tiles;; tiles.advance()) {
    wait_announced<kCluster>(&shared.tile_full[tiles.at()], tiles.parity());
    const Tile tile = shared.tiles[tiles.at()];
    if (tile.gemm == Gemm::kNone) return;
    mbarrier_wait(&shared.tile_stored[tiles.at()], tiles.parity());
    publish_tile(context, tile);
    __syncwarp();
    if (threadIdx.x % 32 != 0) continue;
    if (kCluster == 1) {
      mbarrier_arrive(&shared.tile_empty[tiles.at()]);
    } else {
      peer_arrive(peer_address(&shared.tile_empty[tiles.at()], 0));
    }
  }
}

// Rows of the tiles that a rank's CTAs take first.
__device__ inline int32_t first_rows(const MoeContext& context, int32_t num_ctas) {
  const RankTables tables = context.tables();
  const int32_t items = num_ctas / context.call.sizes.cluster_size;
  int32_t rows = 0;
  for (int32_t i = 0; i < tables.head->num_segments; ++i) {
    const Segment segment = tables.segments[i];
    if (segment.first_item >= items) break;
    rows = at_least(rows, segment.row + segment.num_rows);
  }
  return rows;
}

// While nothing has been pulled yet those who multiply have nothing to do: they pull the rows of
// the first tiles. With one wave no row waits for a tile, so they may pull.
template <bool kIsFp8>
__device__ inline void help_to_pull(const MoeContext& context, int32_t num_ctas) {
  if (context.has_one_wave()) pull_rows<kIsFp8>(context, first_rows(context, num_ctas));
}

// For calls that have none, so that TMA writes none of it. All threads, before a barrier.
template <class Tiles>
__device__ inline void clear_biases(TensorShared<Tiles>& shared) {
  for (int i = threadIdx.x; i < kNumTiles * Tiles::kBiases; i += kTensorThreads) {
    shared.biases[i / Tiles::kBiases][i % Tiles::kBiases] = 0.0f;
  }
}

// Whether this CTA is to work: all of a cluster, or none.
template <class Tiles, int kCluster>
__device__ inline bool decide_to_work(const MoeContext& context, TensorShared<Tiles>& shared) {
  if (kCluster == 1) {
    if (threadIdx.x == 0) shared.is_wanted = context.may_work();
    __syncthreads();
    return shared.is_wanted != 0;
  }
  cluster_sync();  // the other CTA is there, and its barriers are
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    const uint32_t decision = context.may_work();
    for (int32_t r = 0; r < kCluster; ++r) {
      peer_store(peer_address(&shared.is_wanted, r), decision);
    }
  }
  cluster_sync();
  return shared.is_wanted != 0;
}

template <class Tiles, int kCluster>
__device__ inline void multiply_tiles(const MoeContext& context, TensorShared<Tiles>& shared) {
  if constexpr (Tiles::kIsFp8) {
    Fp8Multiplier<Tiles, kCluster>(context, shared).run();
  } else {
    TileMultiplier<Tiles, kCluster>(context, shared).run();
  }
}

template <class Tiles, int kCluster>
__global__ void __launch_bounds__(kTensorThreads, 1)
    tensor_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeMaps maps) {
  extern __shared__ uint8_t dynamic_shared[];
  const DeviceTable* table = find_table(call);
  if (table == nullptr) return;
  const MoeContext context{call, *table, static_cast<int32_t>(blockIdx.x)};
  TensorShared<Tiles>& shared = *reinterpret_cast<TensorShared<Tiles>*>(
      dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) {
    init_barriers<Tiles, kCluster>(shared);
    stamp_ns(call, MoeStamp::kExpertsNs);
  }
  if constexpr (Tiles::kIsAny) {
    if (!call.launch.shape.has_biases) clear_biases<Tiles>(shared);
  }
  if (!decide_to_work<Tiles, kCluster>(context, shared)) return;
  if (context.tables().head->num_items == 0) return;
  const int32_t warp = __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x / 32), 0);
  if (warp < 4) {
    give_registers<kLoaderRegisters>();
    if (warp == 0) {
      TileLoader<Tiles, kCluster>(context, maps, shared).run();
    } else if (warp == 1) {
      publish_tiles<Tiles, kCluster>(context, shared);
    } else if (context.may_pull()) {
      pull_rows<Tiles::kIsFp8>(context, INT32_MAX);
    }
  } else {
    take_registers<kMmaRegisters>();
    help_to_pull<Tiles::kIsFp8>(context, call.ctas_per_rank);
    multiply_tiles<Tiles, kCluster>(context, shared);
  }
  if (threadIdx.x % 32 == 0) stamp_ns(call, MoeStamp::kTilesEndNs);
  if (kCluster > 1) cluster_sync();  // the other CTA no longer arrives or stores here
}

}  // namespace iser::cuda
