// Dispatch by pull: warps copy rows from the sources' token sections to the workspace, in the order
// in which tiles want them.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"

namespace iser::cuda {

constexpr int32_t kPullRows = 2;  // that a warp takes at a time

__device__ inline void copy_row(uint4* to, const uint4* from, int32_t num_words) {
  int32_t i = threadIdx.x % 32;
  for (; i + 96 < num_words; i += 128) {
    const uint4 a = __ldcg(from + i), b = __ldcg(from + i + 32);
    const uint4 c = __ldcg(from + i + 64), d = __ldcg(from + i + 96);
    to[i] = a;
    to[i + 32] = b;
    to[i + 64] = c;
    to[i + 96] = d;
  }
  for (; i < num_words; i += 32) to[i] = __ldcg(from + i);
}

struct PulledRow {
  RowSource source;
  int32_t block;  // its counters
};

__device__ inline PulledRow locate_row(const MoeContext& context, int32_t row) {
  const MoeSizes& sizes = context.call.sizes;
  const RankTables tables = context.tables();
  const int32_t ranks = sizes.slots.num_ranks;
  const int32_t run = run_of(tables.run_first, sizes.num_runs(), row);
  const int32_t slot = run / ranks, source = run % ranks;
  const int32_t* routes = context.block(source).section<int32_t>(Section::kSendRoutes);
  const int32_t route = __ldcg(routes + tables.run_start[run] + row - tables.run_first[run]);
  return {{source, route},
          block_of(sizes, tables.first_block, slot, tables.run_first[slot * ranks], row)};
}

// One warp: copies a row and publishes it to this device. A wave's first rows wait until nothing of
// the wave before is read any more. False once the Domain has failed.
__device__ inline bool pull_row(const MoeContext& context, int32_t row, const PulledRow& pulled) {
  const MoeSizes& sizes = context.call.sizes;
  const RankCounters counters = context.counters();
  const int32_t wave = row / sizes.wave_rows, lane = threadIdx.x % 32;
  if (wave > 0) {
    bool ok = true;
    if (lane == 0) {
      ok = wait_count(context, counters.hidden_done + wave - 1,
                      context.tables().wave_tiles[wave - 1]);
    }
    if (!__shfl_sync(kAllLanes, ok, 0)) return false;
  }
  const size_t bytes = context.call.row_bytes();
  const MoeWorkspace workspace = context.call.workspace();
  const uint8_t* from = context.block(pulled.source.rank).section<uint8_t>(Section::kTokens) +
                        pulled.source.route / sizes.top_k * bytes;
  uint8_t* to = workspace.rows() + workspace.held_row(context.local_idx, row) * bytes;
  copy_row(reinterpret_cast<uint4*>(to), reinterpret_cast<const uint4*>(from),
           static_cast<int32_t>(bytes / sizeof(uint4)));
  if (lane == 0) context.tables().sources[row % sizes.wave_rows] = pulled.source;
  fence_async_proxy();  // TMA reads the row
  __syncwarp();
  if (lane == 0) add_release_gpu(counters.rows_done + pulled.block, 1);
  return true;
}

// One warp: pulls rows until none are left, or none below `limit`.
__device__ inline void pull_rows(const MoeContext& context, int32_t limit) {
  uint32_t* next = context.counters().next_row;
  const int32_t num_rows = context.tables().head->num_rows, lane = threadIdx.x % 32;
  for (;;) {
    int32_t first = INT32_MAX;
    if (lane == 0 && !has_failed(context.table) &&
        static_cast<int32_t>(load_relaxed(next)) < limit) {
      first = static_cast<int32_t>(atomicAdd(next, static_cast<uint32_t>(kPullRows)));
    }
    first = __shfl_sync(kAllLanes, first, 0);
    if (first >= num_rows) return;
    const int32_t count = at_most(num_rows - first, kPullRows);
    PulledRow found{};
    if (lane < count) found = locate_row(context, first + lane);
    for (int32_t i = 0; i < count; ++i) {
      const PulledRow pulled{{__shfl_sync(kAllLanes, found.source.rank, i),
                              __shfl_sync(kAllLanes, found.source.route, i)},
                             __shfl_sync(kAllLanes, found.block, i)};
      if (!pull_row(context, first + i, pulled)) return;
    }
  }
}

}  // namespace iser::cuda
