// Dispatch by pull: warps copy rows from the sources' token sections to the workspace, in the order
// in which tiles want them.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"

namespace iser::cuda {

// Rows that a warp takes at a time: few at first, when all tiles wait for the first rows.
constexpr int32_t kFirstPullRows = 2, kPullRows = 8;

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

// Two rows at once, so that as many loads of short ones are under way: kAhead words of either.
template <int kAhead>
__device__ inline void copy_rows(uint4* to, const uint4* from, uint4* other_to,
                                 const uint4* other_from, int32_t num_words) {
  int32_t i = threadIdx.x % 32;
  for (; i + 32 * (kAhead - 1) < num_words; i += 32 * kAhead) {
    uint4 words[kAhead], others[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      words[k] = __ldcg(from + i + 32 * k);
      others[k] = __ldcg(other_from + i + 32 * k);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      to[i + 32 * k] = words[k];
      other_to[i + 32 * k] = others[k];
    }
  }
  for (; i < num_words; i += 32) {
    const uint4 a = __ldcg(from + i), b = __ldcg(other_from + i);
    to[i] = a;
    other_to[i] = b;
  }
}

// Of a token, from behind its values to where tiles look for them.
__device__ inline void copy_scales(const MoeWorkspace& workspace, int64_t held_row,
                                   const uint8_t* from) {
  const float* scales = reinterpret_cast<const float*>(from);
  const int32_t count = fp8::num_blocks(workspace.sizes.hidden);
  for (int32_t i = threadIdx.x % 32; i < count; i += 32) {
    workspace.row_scales(i)[held_row] = __ldcg(scales + i);
  }
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
          block_of(sizes, tables.first_block, slot, tables.run_first[slot * ranks],
                   tables.run_first[(slot + 1) * ranks], row)};
}

// A wave's rows wait until nothing of the wave before is read any more. One warp. False once the
// Domain has failed.
__device__ inline bool wait_for_room(const MoeContext& context, int32_t wave) {
  if (wave == 0) return true;
  bool ok = true;
  if (threadIdx.x % 32 == 0) {
    ok = wait_count(context, context.counters().hidden_done + wave - 1,
                    context.tables().wave_tiles[wave - 1]);
  }
  return __shfl_sync(kAllLanes, ok, 0);
}

// One warp: copies a row, or this one and the next of the same wave, and publishes them to this
// device. All lanes have the same arguments.
template <bool kIsFp8>
__device__ inline void pull(const MoeContext& context, int32_t row, const PulledRow& pulled,
                            const PulledRow* next) {
  const MoeSizes& sizes = context.call.sizes;
  const MoeWorkspace workspace = context.call.workspace();
  const size_t bytes = sizes.token_bytes();
  const int32_t words = static_cast<int32_t>(bytes / sizeof(uint4)), lane = threadIdx.x % 32;
  const int64_t held = workspace.held_row(context.local_idx, row);
  const auto token = [&](const RowSource& source) {
    return context.block(source.rank).section<uint8_t>(Section::kTokens) +
           source.route / sizes.top_k * bytes;
  };
  const uint8_t* from = token(pulled.source);
  uint4* to = reinterpret_cast<uint4*>(workspace.rows() + held * bytes);
  if (next == nullptr) {
    copy_row(to, reinterpret_cast<const uint4*>(from), words);
  } else {
    const uint8_t* other = token(next->source);
    // Beside bf16's accumulators more would be spilled by those who multiply.
    copy_rows<kIsFp8 ? 4 : 2>(to, reinterpret_cast<const uint4*>(from), to + words,
                              reinterpret_cast<const uint4*>(other), words);
    if (kIsFp8) copy_scales(workspace, held + 1, other + fp8::plane_values(1, sizes.hidden));
  }
  if (kIsFp8) copy_scales(workspace, held, from + fp8::plane_values(1, sizes.hidden));
  RowSource* const sources = context.tables().sources + row % sizes.wave_rows;
  if (lane == 0) sources[0] = pulled.source;
  if (lane == 1 && next != nullptr) sources[1] = next->source;
  fence_async_proxy();  // TMA reads the rows
  __syncwarp();
  if (lane > 0) return;
  uint32_t* const done = context.counters().rows_done;
  const bool is_one_block = next != nullptr && next->block == pulled.block;
  add_release_gpu(done + pulled.block, is_one_block ? 2 : 1);
  if (next != nullptr && !is_one_block) add_release_gpu(done + next->block, 1);
}

// One warp: pulls rows until none are left, or none below `limit`.
template <bool kIsFp8>
__device__ inline void pull_rows(const MoeContext& context, int32_t limit) {
  const MoeSizes& sizes = context.call.sizes;
  uint32_t* next_row = context.counters().next_row;
  const int32_t num_rows = context.tables().head->num_rows, lane = threadIdx.x % 32;
  for (int32_t take = kFirstPullRows;; take = kPullRows) {
    int32_t first = INT32_MAX;
    if (lane == 0 && !has_failed(context.table) &&
        static_cast<int32_t>(load_relaxed(next_row)) < limit) {
      first = static_cast<int32_t>(atomicAdd(next_row, static_cast<uint32_t>(take)));
    }
    first = __shfl_sync(kAllLanes, first, 0);
    if (first >= num_rows) return;
    const int32_t count = at_most(num_rows - first, take);
    PulledRow found{};
    if (lane < count) found = locate_row(context, first + lane);
    const auto at = [&](int32_t i) {
      return PulledRow{{__shfl_sync(kAllLanes, found.source.rank, i),
                        __shfl_sync(kAllLanes, found.source.route, i)},
                       __shfl_sync(kAllLanes, found.block, i)};
    };
    for (int32_t i = 0; i < count; i += 2) {
      const int32_t row = first + i, wave = row / sizes.wave_rows;
      if (!wait_for_room(context, wave)) return;
      const PulledRow one = at(i), other = at(i + 1);
      const bool has_other = i + 1 < count, is_pair = (row + 1) / sizes.wave_rows == wave;
      pull<kIsFp8>(context, row, one, has_other && is_pair ? &other : nullptr);
      if (!has_other || is_pair) continue;
      if (!wait_for_room(context, wave + 1)) return;
      pull<kIsFp8>(context, row + 1, other, nullptr);
    }
  }
}

}  // namespace iser::cuda
