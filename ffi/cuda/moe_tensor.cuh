// The tensor engine: bf16 tiles of up to 256 rows by wgmma, operands by TMA.
//
// A CTA has three warpgroups. In the first, one warp takes tiles and loads their operands, one
// publishes tiles that have been stored, two pull rows. The other two multiply: a tile's blocks of
// 64 rows alternate between them. Every block is a chain of m64n192k16 products in increasing k,
// whatever the tile, so that a row's bits depend on the row and the weights alone.
//
// In clusters of two CTAs the pair takes tiles of the same rows and neighbouring columns: each
// loads half of the rows' blocks into both, so that less comes from L2. The first CTA takes tiles
// for both.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_maps.cuh"
#include "ffi/cuda/moe_mma.cuh"
#include "ffi/cuda/moe_pull.cuh"

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

// One warp, which takes tiles; its first lane loads.
template <int kCluster>
class TileLoader {
 public:
  __device__ TileLoader(const MoeContext& context, const MoeMaps& maps, TensorShared& shared)
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
    for (;;) {
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
    tiles_.advance();
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
    const int32_t num_steps = depth / kStepColumns;
    const int32_t num_blocks = ceil_div(tile.num_rows, kMmaRows);
    const int32_t row =
        static_cast<int32_t>(call.workspace().held_row(context_.local_idx, tile.row));
    const CUtensorMap* rows = is_inner ? &maps_.rows : &maps_.inner;
    const CUtensorMap* weights = is_inner ? &maps_.gate : &maps_.down;
    int32_t plane = 0;
    if (is_helper) {
      const MoeWorkspace workspace = call.workspace();
      weights = reinterpret_cast<const CUtensorMap*>(
          workspace.map(context_.local_idx, is_inner ? kBankInner : kBankHidden));
      acquire_map(weights);
      plane = context_.helper_plane(tile.slot) + (is_inner ? 0 : 2);
    } else {
      plane = context_.expert(tile.slot);
    }
    const uint32_t bytes = num_blocks * kBlockBytes + kWeightBytes;
    const int32_t column = tile.column * (is_inner ? kInnerColumns : kMmaColumns);
    const bool is_first = threadIdx.x % 32 == 0;
    int32_t item = 0;
    for (int32_t step = 0; step < num_steps; ++step) {
      if (is_first) {
        uint64_t* full = &shared_.full[steps_.at];
        uint8_t* to = shared_.steps[steps_.at];
        mbarrier_wait(&shared_.empty[steps_.at], steps_.parity ^ 1);
        mbarrier_arrive_expect(full, bytes);
        const int32_t k = step * kStepColumns;
        load_rows(to, rows, k, row, num_blocks, full);
        load_box_3d(to + kRowsBytes, weights, k, column, plane, full);
        if (is_inner) {
          load_box_3d(to + kRowsBytes + kInnerColumns * kSwizzleRow,
                      is_helper ? weights : &maps_.up, k, column, plane + is_helper, full);
        }
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
  TensorShared& shared_;
  TileGate gate_;
  bool has_failed_ = false;  // seen a moment ago
  RingAt<kNumSteps> steps_;
  TileRing tiles_;
};

// One warp. Consumers go on to the next tile while their stores are on their way.
template <int kCluster>
__device__ inline void publish_tiles(const MoeContext& context, TensorShared& shared) {
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

// While nothing has been pulled yet those who multiply have nothing to do. With one wave no row
// waits for a tile, so they may pull.
__device__ inline void help_to_pull(const MoeContext& context, int32_t num_ctas) {
  if (context.tables().head->num_rows > context.call.sizes.wave_rows) return;
  pull_rows(context, num_ctas * kMmaWarps);
}

// Whether this CTA is to work: all of a cluster, or none.
template <int kCluster>
__device__ inline bool decide_to_work(const MoeCall& call, const DeviceTable& table,
                                      TensorShared& shared) {
  const int32_t cta = blockIdx.y;
  const bool is_wanted = cta / kCluster * kCluster < call.ctas_per_rank;
  if (kCluster == 1) {
    if (threadIdx.x == 0) shared.is_wanted = is_wanted || has_come(table, Stage::kReady);
    __syncthreads();
    return shared.is_wanted != 0;
  }
  cluster_sync();  // the other CTA is there, and its barriers are
  if (threadIdx.x == 0 && cluster_rank() == 0) {
    const uint32_t decision = is_wanted || has_come(table, Stage::kReady);
    for (int32_t r = 0; r < kCluster; ++r) {
      peer_store(peer_address(&shared.is_wanted, r), decision);
    }
  }
  cluster_sync();
  return shared.is_wanted != 0;
}

template <int kCluster>
__global__ void __launch_bounds__(kTensorThreads, 1)
    tensor_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeMaps maps) {
  extern __shared__ uint8_t dynamic_shared[];
  const DeviceTable* table = find_table(call);
  if (table == nullptr) return;
  const MoeContext context{call, *table, static_cast<int32_t>(blockIdx.x)};
  TensorShared& shared = *reinterpret_cast<TensorShared*>(
      dynamic_shared + (1024 - shared_address(dynamic_shared) % 1024) % 1024);
  if (threadIdx.x == 0) {
    init_barriers<kCluster>(shared);
    stamp_ns(call, MoeStamp::kExpertsNs);
  }
  if (!decide_to_work<kCluster>(call, *table, shared)) return;
  if (context.tables().head->num_items == 0) return;
  const int32_t warp = __shfl_sync(kAllLanes, static_cast<int32_t>(threadIdx.x / 32), 0);
  if (warp < 4) {
    give_registers<kLoaderRegisters>();
    if (warp == 0) {
      TileLoader<kCluster>(context, maps, shared).run();
    } else if (warp == 1) {
      publish_tiles<kCluster>(context, shared);
    } else {
      pull_rows(context, INT32_MAX);
    }
  } else {
    take_registers<kMmaRegisters>();
    help_to_pull(context, call.ctas_per_rank);
    TileMultiplier<kCluster>(context, shared).run();
  }
  if (threadIdx.x % 32 == 0) stamp_ns(call, MoeStamp::kTilesEndNs);
  if (kCluster > 1) cluster_sync();  // the other CTA no longer arrives or stores here
}

}  // namespace iser::cuda
