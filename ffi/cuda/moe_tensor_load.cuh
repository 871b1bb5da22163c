// The warp of the tensor engine that takes tiles and loads their operands.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_maps.cuh"
#include "ffi/cuda/moe_tensor_shared.cuh"

namespace iser::cuda {

// One warp, which takes tiles; its first lane loads.
template <class Tiles, int kCluster>
class TileLoader {
 public:
  using Shared = TensorShared<Tiles>;

  __device__ TileLoader(const MoeContext& context, const MoeMaps& maps, Shared& shared)
      : context_(context), maps_(maps), shared_(shared), gate_{context} {}

  __device__ void run() {
    if (kCluster > 1 && cluster_rank() > 0) {
      follow();
    } else {
      lead();
    }
  }

 private:
  __device__ void lead() {
    TileQueue queue(context_);
    find_next(queue, threadIdx.x % 32 == 0 ? queue.claim() : 0);
    for (;; tiles_.advance()) {
      const Tile tile = shared_.next;
      const int32_t is_over = threadIdx.x % 32 == 0 ? !announce(tile) : 0;
      if (__shfl_sync(kAllLanes, is_over, 0)) return;
      load(tile, &queue);
    }
  }

  // The tile of lane 0's item; the registers that would keep it are wanted for loads.
  __device__ void find_next(TileQueue& queue, int32_t item) {
    item = __shfl_sync(kAllLanes, item, 0);
    const Tile tile = item < queue.num_items ? queue.find(item) : Tile{Gemm::kNone};
    if (threadIdx.x % 32 == 0) shared_.next = tile;
    __syncwarp();
  }

  // Loads what the first CTA of the cluster has announced here; all waits but for room are its.
  __device__ void follow() {
    if (threadIdx.x % 32 != 0) return;
    for (;; tiles_.advance()) {
      wait_announced<kCluster>(&shared_.tile_full[tiles_.at()], tiles_.parity());
      const Tile tile = shared_.tiles[tiles_.at()];
      if (tile.gemm == Gemm::kNone) return;
      fence_async_proxy();
      load(tile, nullptr);
    }
  }

  // To everybody in the cluster, once the tile can be loaded. False for the end, and where the
  // Domain has failed. One thread.
  __device__ bool announce(Tile tile) {
    if (tile.gemm != Gemm::kNone && (has_failed_ || !gate_.open(tile))) tile.gemm = Gemm::kNone;
    fence_async_proxy();  // rows, h and replicas that the gate has acquired are read by TMA
    mbarrier_wait(&shared_.tile_empty[tiles_.at()], tiles_.parity() ^ 1);
    if (kCluster > 1) announce_to_peer(tile);
    shared_.tiles[tiles_.at()] = tile;
    mbarrier_arrive(&shared_.tile_full[tiles_.at()]);
    return tile.gemm != Gemm::kNone;
  }

  __device__ void announce_to_peer(Tile tile) {
    ++tile.column;
    const uint32_t to = peer_address(&shared_.tiles[tiles_.at()], 1);
    const uint32_t words[kTileWords] = {
        static_cast<uint32_t>(tile.gemm),     static_cast<uint32_t>(tile.slot),
        static_cast<uint32_t>(tile.wave),     static_cast<uint32_t>(tile.row),
        static_cast<uint32_t>(tile.num_rows), static_cast<uint32_t>(tile.block),
        static_cast<uint32_t>(tile.column)};
#pragma unroll
    for (int i = 0; i < kTileWords; ++i) peer_store(to + 4 * i, words[i]);
    peer_release(peer_address(&shared_.tile_full[tiles_.at()], 1));
  }

  // The cluster's CTAs take turns with the blocks of rows.
  __device__ void load_rows(uint8_t* to, const CUtensorMap* map, int32_t k, int32_t row,
                            int32_t num_blocks, uint64_t* full) const {
    if (kCluster == 1) {
#pragma unroll 1
      for (int32_t i = 0; i < num_blocks; ++i) {
        load_box_2d(to + i * kBlockBytes, map, k, row + i * kMmaRows, full);
      }
    } else {
#pragma unroll 1
      for (int32_t i = cluster_rank(); i < num_blocks; i += kCluster) {
        load_box_2d_to((1 << kCluster) - 1, to + i * kBlockBytes, map, k, row + i * kMmaRows, full);
      }
    }
  }

  // Of a product of h: gate's and up's boxes in turn, so that the columns of h that a warpgroup
  // makes lie together. `map` is gate's, which up's follows, or down's.
  __device__ void load_weights(uint8_t* to, bool is_inner, const CUtensorMap* map, int32_t k,
                               int32_t column, int32_t plane, uint64_t* full) const {
    if (is_inner) {
#pragma unroll
      for (int i = 0; i < Tiles::kWeightRows / Tiles::kInnerBox; ++i) {
        load_box_3d(to + i * Tiles::kInnerBox * kSwizzleRow, map + i % 2, k,
                    column + i / 2 * Tiles::kInnerBox, plane, full);
      }
    } else {
#pragma unroll
      for (int i = 0; i < Tiles::kWeightRows / Tiles::kHiddenBox; ++i) {
        load_box_3d(to + i * Tiles::kHiddenBox * kSwizzleRow, map, k,
                    column + i * Tiles::kHiddenBox, plane, full);
      }
    }
  }

  // Biases of the tile's columns that are there; none for a column behind the last.
  __device__ int32_t num_biases(const Tile& tile) const {
    const MoeSizes& sizes = context_.call.sizes;
    const bool is_inner = tile.gemm == Gemm::kInner;
    const int32_t columns = is_inner ? Tiles::kInner : Tiles::kHidden;
    const int32_t left = (is_inner ? sizes.intermediate : sizes.hidden) - tile.column * columns;
    return at_least(at_most(left, columns), 0);
  }

  __device__ uint32_t bias_bytes(const Tile& tile) const {
    return num_biases(tile) * sizeof(float) * (tile.gemm == Gemm::kInner ? 2 : 1);
  }

  __device__ void load_bias(const Tile& tile, int32_t plane, float* to, int32_t first,
                            uint64_t* full) const {
    const float* const from = reinterpret_cast<const float*>(context_.plane(tile.slot, plane));
    bulk_load(to, from + first, num_biases(tile) * sizeof(float), full);
  }

  // To where those who multiply find them once the tile's first step is there.
  __device__ void load_biases(const Tile& tile, uint64_t* full) const {
    if (num_biases(tile) == 0) return;
    float* const to = shared_.biases[tiles_.at()];
    if (tile.gemm == Gemm::kInner) {
      load_bias(tile, kGateBiasPlane, to, tile.column * Tiles::kInner, full);
      load_bias(tile, kUpBiasPlane, to + Tiles::kInner, tile.column * Tiles::kInner, full);
    } else {
      load_bias(tile, kDownBiasPlane, to, tile.column * Tiles::kHidden, full);
    }
  }

  // Whether `before` steps are left with this one, or at the first where there are not as many.
  __device__ static bool is_due(int32_t step, int32_t num_steps, int32_t before) {
    return step + before == num_steps || (step == 0 && num_steps < before);
  }

  // Lane 0 loads. With a queue, a whole warp: the next tile is found meanwhile, before the last
  // steps, so that those who multiply do not wait for it.
  __device__ void load(const Tile& tile, TileQueue* queue) {
    const MoeCall& call = context_.call;
    const bool is_inner = tile.gemm == Gemm::kInner, is_helper = call.is_helper(tile.slot);
    const int32_t depth = is_inner ? call.sizes.hidden : call.sizes.intermediate;
    const int32_t num_steps = Tiles::num_steps(depth);
    const int32_t num_blocks = ceil_div(tile.num_rows, kMmaRows);
    const int32_t row =
        static_cast<int32_t>(call.workspace().held_row(context_.local_idx, tile.row));
    const CUtensorMap* rows = is_inner ? &maps_.rows : &maps_.inner;
    const CUtensorMap* weights = maps_.weights + (is_inner ? kGatePlane : kDownPlane);
    const CUtensorMap* scales = is_inner ? &maps_.row_scales : &maps_.inner_scales;
    int32_t plane = 0;
    if (is_helper) {
      weights = reinterpret_cast<const CUtensorMap*>(
          call.workspace().map(context_.local_idx, is_inner ? kGatePlane : kDownPlane));
      acquire_map(weights);
      if (is_inner) acquire_map(weights + 1);
      plane = context_.helper_bundle(tile.slot);
    } else {
      plane = context_.expert(tile.slot);
    }
    const uint32_t bytes = num_blocks * kBlockBytes + Shared::kWeightBytes +
                           (Tiles::kIsFp8 ? Tiles::kScaleBox * sizeof(float) : 0);
    const int32_t column = tile.column * (is_inner ? Tiles::kInner : Tiles::kHidden);
    const bool is_first = threadIdx.x % 32 == 0;
    int32_t item = 0;
    for (int32_t step = 0; step < num_steps; ++step) {
      if (is_first) {
        uint64_t* full = &shared_.full[steps_.at];
        uint8_t* to = shared_.steps[steps_.at];
        mbarrier_wait(&shared_.empty[steps_.at], steps_.parity ^ 1);
        const bool has_biases = Tiles::kIsAny && step == 0 && call.launch.shape.has_biases;
        mbarrier_arrive_expect(full, bytes + (has_biases ? bias_bytes(tile) : 0));
        if (has_biases) load_biases(tile, full);
        const int32_t k = step * Tiles::kStepColumns;
        load_rows(to, rows, k, row, num_blocks, full);
        load_weights(to + Shared::kRowsBytes, is_inner, weights, k, column, plane, full);
        if (Tiles::kIsFp8) load_box_2d(shared_.scales[steps_.at], scales, row & ~3, step, full);
        if (queue != nullptr && is_due(step, num_steps, 6)) item = queue->claim();
      }
      steps_.advance();
      if (queue != nullptr && is_due(step, num_steps, 4)) {
        has_failed_ = has_failed(context_.table);
        find_next(*queue, item);
      }
    }
  }

  const MoeContext& context_;
  const MoeMaps& maps_;
  Shared& shared_;
  TileGate gate_;
  bool has_failed_ = false;  // seen a moment ago
  RingAt<Tiles::kNumSteps> steps_;
  TileRing tiles_;
};

}  // namespace iser::cuda
