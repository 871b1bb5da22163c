// After the tiles: READY of every rank, this device's routes from wherever they were computed, and
// their weighted sums.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_begin.cuh"
#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_elements.cuh"
#include "ffi/cuda/plan_outputs.cuh"

namespace iser::cuda {

constexpr int kGateThreads = kRankThreads, kCombineThreads = 256;

// Until all routes of a rank's tokens are computed, with the Domain's limit. One thread.
__device__ inline void wait_combined(const MoeCall& call, const DeviceTable& table, int32_t rank) {
  const BlockView block{table.blocks[rank], &call.block};
  const RankWords* words = block.words();
  const uint32_t wanted =
      words->routes_expected * static_cast<uint32_t>(call.sizes.units_per_route());
  const uint64_t begin = global_ns(), limit = wait_limit(table);
  for (;;) {
    if (load_acquire(&words->routes_done) == wanted || has_failed(table)) return;
    if (global_ns() - begin < limit) continue;
    fail_at(table, ErrorCode::kTimeout, rank, -1, Stage::kCombine, limit / 1'000'000,
            is_first_call(table));
    return;
  }
}

// One CTA waits for all peers, and decides for all CTAs that follow whether the call has failed.
__global__ void __launch_bounds__(kGateThreads) gate_kernel(const __grid_constant__ MoeCall call) {
  __shared__ bool ok;
  const DeviceTable* table = find_table(call);
  if (table == nullptr) return;
  if (threadIdx.x == 0) {
    ok = wait(*table, Stage::kReady, table->first_rank, *table->plan.generation,
              table->call->params.layer);
    note_ready(*table);
  }
  __syncthreads();
  if (ok && threadIdx.x < call.sizes.slots.num_ranks) {
    check_plan(*table, threadIdx.x, *table->plan.generation, table->call->params.layer);
  }
  __syncthreads();
  if (ok && threadIdx.x < call.sizes.ranks_per_device) {
    wait_combined(call, *table, table->first_rank + threadIdx.x);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  call.workspace().words()->verdict = has_failed(*table) ? error_code(*table) : 0;
  stamp_ns(call, MoeStamp::kGateNs);
}

// y[t], one word of it: the sum over k, in order, of weight * expert output; padding adds nothing.
template <class Elements>
__device__ inline uint4 combine_word(const uint4* rows, size_t row_words, const int32_t* slots,
                                     const float* weights, int32_t top_k) {
  constexpr int kAhead = 4;  // loads under way
  float sum[Elements::kCount] = {};
  for (int32_t first = 0; first < top_k; first += kAhead) {
    uint4 words[kAhead];
    float weight[kAhead];
    bool counts[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int32_t k = first + i;
      counts[i] = k < top_k && slots[k] >= 0;
      words[i] = counts[i] ? rows[k * row_words] : uint4{};
      weight[i] = counts[i] ? weights[k] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      float values[Elements::kCount];
      Elements::read(words[i], values);
#pragma unroll
      for (int j = 0; j < Elements::kCount; ++j) {
        if (counts[i]) sum[j] = __fadd_rn(sum[j], __fmul_rn(weight[i], values[j]));
      }
    }
  }
  return Elements::write(sum);
}

// What the program sees of the plan; as plan.cu leaves one that failed, where `code` is not 0.
__device__ inline void write_plan(const MoeCall& call, const DeviceTable* table, int32_t code) {
  const size_t ranks = call.sizes.slots.num_ranks;
  const size_t rows = ranks * call.sizes.slots.num_helper_slots;
  const size_t routes =
      static_cast<size_t>(call.sizes.ranks_per_device) * call.sizes.num_tokens * call.sizes.top_k;
  const PlanOutputs& to = call.launch.plan;
  if (code == 0) {
    const PlanOutputs& from = table->plan;
    copy_words(to.route_slot, from.route_slot, routes);
    copy_words(to.broadcasts, from.broadcasts, 6 * rows);
    copy_words(to.quota, from.quota, rows * ranks);
    copy_words(to.load_before, from.load_before, ranks);
    copy_words(to.load, from.load, ranks);
  } else {
    fill_no_plan(to, call.sizes.slots, routes);
  }
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  *to.num_broadcasts = code == 0 ? *table->plan.num_broadcasts : 0;
  *to.status = code;
  *to.generation = table == nullptr ? 0 : *table->plan.generation;
}

// The device's tokens; a CTA takes one at a time.
template <class Elements>
__device__ inline void combine_tokens(const MoeCall& call, const DeviceTable& table) {
  const MoeSizes& sizes = call.sizes;
  const size_t row_words = call.row_bytes() / sizeof(uint4);
  const int32_t num_tokens = sizes.ranks_per_device * sizes.num_tokens;
  for (int32_t token = blockIdx.x; token < num_tokens; token += gridDim.x) {
    const int32_t rank = table.first_rank + token / sizes.num_tokens;
    const BlockView block{table.blocks[rank], &call.block};
    const size_t route = static_cast<size_t>(token) * sizes.top_k;
    const uint4* rows = block.section<uint4>(Section::kCombine) +
                        static_cast<size_t>(token % sizes.num_tokens) * sizes.top_k * row_words;
    uint4* to = static_cast<uint4*>(call.launch.y) + token * row_words;
    for (size_t word = threadIdx.x; word < row_words; word += kCombineThreads) {
      to[word] = combine_word<Elements>(rows + word, row_words, table.plan.route_slot + route,
                                        call.launch.topk_weights + route, sizes.top_k);
    }
  }
}

template <class Elements>
__global__ void __launch_bounds__(kCombineThreads)
    combine_kernel(const __grid_constant__ MoeCall call) {
  const DeviceTable* table = find_table(call);
  DeviceWords* words = call.workspace().words();
  const int32_t code =
      table == nullptr ? static_cast<int32_t>(ErrorCode::kBadHandle) : words->verdict;
  write_plan(call, table, code);
  if (code == 0) {
    combine_tokens<Elements>(call, *table);
  } else {
    const size_t tokens = static_cast<size_t>(call.sizes.ranks_per_device) * call.sizes.num_tokens;
    fill_words(static_cast<int32_t*>(call.launch.y), -1,  // a NaN in every dtype
               tokens * call.row_bytes() / sizeof(int32_t));
  }
  if (is_last_cta(&words->combined) && threadIdx.x == 0) {
    if (table != nullptr) {
      table->call->is_in_flight = 0;
      if (code == 0) table->times_of(*table->plan.generation).finished = global_ns();
    }
    stamp_ns(call, MoeStamp::kEndNs);
  }
}

}  // namespace iser::cuda
