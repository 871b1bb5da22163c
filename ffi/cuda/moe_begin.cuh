// Before the tiles: tokens become readable to peers, and each rank makes its schedule.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_context.cuh"
#include "ffi/cuda/moe_elements.cuh"
#include "ffi/cuda/moe_maps.cuh"
#include "ffi/cuda/moe_mma.cuh"

namespace iser::cuda {

constexpr int kBeginThreads = 256, kScheduleThreads = 256;
constexpr size_t kMaxSharedSegments = 160 * 1024;  // bytes; a larger schedule is made in place

// Whether the weights are where start found them: XLA frees an operand of start that this call does
// not take, while peers may still read it.
__device__ inline bool has_same_weights(const MoeCall& call, const CallTag& tag, int32_t layer) {
  const BundleLayout& bundle = call.block.bundle;
  const int32_t experts = call.sizes.ranks_per_device * call.sizes.slots.num_home();
  const uint64_t first = call.launch.num_stacked > 0 ? uint64_t{1} * layer * experts : 0;
  bool is_same = true;
  for (int32_t i = 0; i < bundle.num_planes; ++i) {
    const uint64_t base = reinterpret_cast<uint64_t>(call.launch.weights[i]);
    is_same = is_same && tag.weights[i] == base + first * bundle.planes[i].bytes;
  }
  return is_same;
}

// Whether the plan that COPY has made is one that this call completes. One thread.
__device__ inline bool fits_plan(const MoeCall& call, const DeviceTable& table) {
  const uint32_t generation = *table.plan.generation;
  const CallTag& tag = mail_tags(call.launch.shape, table.head(), generation)[table.first_rank].tag;
  if (tag.num_tokens != call.sizes.num_tokens || tag.is_plan_only) {
    fail_at(table, ErrorCode::kBadFusedMoe, table.first_rank, -1, Stage::kDispatch, tag.num_tokens,
            call.sizes.num_tokens);
    return false;
  }
  const int32_t layers = call.launch.num_stacked, layer = table.call->params.layer;
  if (layer < 0 || (layers > 0 && layer >= layers)) {
    fail_at(table, ErrorCode::kBadLayer, table.first_rank, -1, Stage::kDispatch, layers, layer);
    return false;
  }
  if (!table.call->is_in_flight || !has_same_weights(call, tag, layer)) {
    fail_at(table, ErrorCode::kBadFusedMoe, table.first_rank, -1, Stage::kDispatch, 1,
            table.call->is_in_flight);
    return false;
  }
  return true;
}

__device__ inline void copy_tokens(const MoeCall& call, const uint4* from, uint4* to) {
  const size_t words = call.row_bytes() * call.sizes.num_tokens / sizeof(uint4);
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < words;
       i += step) {
    to[i] = from[i];
  }
}

// bf16 to values and scales of 128 columns. One warp a token, eight columns a lane.
__device__ inline void quantize_tokens(const MoeCall& call, const uint4* from, uint8_t* to) {
  const int32_t hidden = call.sizes.hidden, lane = threadIdx.x % 32;
  const int32_t warps = gridDim.x * (kBeginThreads / 32);
  for (int32_t token = blockIdx.x * (kBeginThreads / 32) + threadIdx.x / 32;
       token < call.sizes.num_tokens; token += warps) {
    const uint4* const words = from + static_cast<size_t>(token) * (hidden / 8);
    uint8_t* const record = to + token * call.sizes.token_bytes();
    float* const scales = reinterpret_cast<float*>(record + fp8::plane_values(1, hidden));
    for (int32_t first = 0; first < hidden; first += 256) {
      const int32_t column = first + 8 * lane;
      const bool is_there = column < hidden;
      float values[8], amax = 0.0f;
      Bf16x8::read(is_there ? words[column / 8] : uint4{}, values);
#pragma unroll
      for (int i = 0; i < 8; ++i) amax = fmaxf(amax, fabsf(values[i]));
#pragma unroll
      for (int d = 1; d < 16; d *= 2) amax = fmaxf(amax, __shfl_xor_sync(kAllLanes, amax, d));
      if (!is_there) continue;
      const fp8::Scale scale = fp8::Scale::of(amax);
      uint32_t packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        packed[i] = pack_e4m3(values[2 * i] * scale.up, values[2 * i + 1] * scale.up);
      }
      *reinterpret_cast<uint2*>(record + column) =
          uint2{packed[0] | packed[1] << 16, packed[2] | packed[3] << 16};
      if (lane % 16 == 0) scales[column / fp8::kBlock] = scale.down;
    }
  }
}

// Copies the device's tokens to symmetric memory; the last CTA arrives at kDispatch for its ranks.
__global__ void __launch_bounds__(kBeginThreads)
    begin_kernel(const __grid_constant__ MoeCall call) {
  __shared__ bool ok;
  const DeviceTable* table = find_table(call);
  if (table == nullptr) return;
  if (threadIdx.x == 0) stamp_ns(call, MoeStamp::kBeginNs);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    table->times_of(*table->plan.generation).fused_called = global_ns();
  }
  const int32_t ranks = call.sizes.ranks_per_device;
  const size_t words = call.row_bytes() * call.sizes.num_tokens / sizeof(uint4);
  for (int32_t v = 0; v < ranks; ++v) {
    const uint4* from = static_cast<const uint4*>(call.launch.x) + v * words;
    uint8_t* to = BlockView{table->blocks[table->first_rank + v], &call.block}.section<uint8_t>(
        Section::kTokens);
    if (call.sizes.is_fp8()) {
      quantize_tokens(call, from, to);
    } else {
      copy_tokens(call, from, reinterpret_cast<uint4*>(to));
    }
  }
  if (!is_last_cta(&call.workspace().words()->begun)) return;
  for (int32_t v = threadIdx.x; v < ranks; v += blockDim.x) {
    const BlockView block{table->blocks[table->first_rank + v], &call.block};
    RankWords* rank_words = block.words();
    const int32_t* starts = block.section<int32_t>(Section::kSendStarts);
    rank_words->routes_expected = starts[call.sizes.slots.num_slots()];
    rank_words->routes_done = 0;
  }
  if (threadIdx.x == 0) ok = !has_failed(*table) && fits_plan(call, *table);
  __syncthreads();
  if (!ok || threadIdx.x >= 32) return;
  for (int32_t v = 0; v < ranks; ++v) {
    arrive(*table, Stage::kDispatch, table->first_rank + v, *table->plan.generation);
  }
}

// Exclusive sums over `values` [count] in place, which then ends with their total.
__device__ inline void scan_in_place(int32_t* values, int32_t count) {
  __shared__ int32_t sums[kScheduleThreads];
  const int32_t share = ceil_div(count, kScheduleThreads);
  const int32_t begin = at_most(threadIdx.x * share, count), end = at_most(begin + share, count);
  int32_t sum = 0;
  for (int32_t i = begin; i < end; ++i) sum += values[i];
  sums[threadIdx.x] = sum;
  __syncthreads();
  for (int32_t distance = 1; distance < kScheduleThreads; distance *= 2) {
    const int32_t other = threadIdx.x >= distance ? sums[threadIdx.x - distance] : 0;
    __syncthreads();
    sums[threadIdx.x] += other;
    __syncthreads();
  }
  int32_t before = sums[threadIdx.x] - sum;
  for (int32_t i = begin; i < end; ++i) {
    const int32_t value = values[i];
    values[i] = before;
    before += value;
  }
  if (threadIdx.x == kScheduleThreads - 1) values[count] = before;
  __syncthreads();
}

// Puts this Domain's helper banks into the maps that have no address. One warp.
__device__ inline void make_bank_maps(const MoeContext& context, const MoeMaps& maps) {
  __shared__ alignas(128) uint8_t map[kMapBytes];
  const uint8_t* banks = context.block(context.rank()).section<uint8_t>(Section::kBanks);
  const int32_t lane = threadIdx.x % 32;
  for (int32_t which = 0; which < kNumWeightPlanes; ++which) {
    reinterpret_cast<uint32_t*>(map)[lane] =
        reinterpret_cast<const uint32_t*>(&maps.bank[which])[lane];
    __syncwarp();
    if (lane == 0) replace_map_address(map, banks + context.call.block.bundle.planes[which].offset);
    __syncwarp();
    release_map(context.call.workspace().map(context.local_idx, which), map);
    __syncwarp();
  }
}

// A CTA a rank: reads what every source sends to its slots and numbers the tiles. Where the Domain
// has failed the schedule is empty.
__global__ void __launch_bounds__(kScheduleThreads)
    schedule_kernel(const __grid_constant__ MoeCall call, const __grid_constant__ MoeMaps maps,
                    bool has_maps, bool is_shared) {
  extern __shared__ __align__(32) uint8_t shared_segments[];
  __shared__ int32_t slot_first[kMaxLocalSlots + 1];
  __shared__ ScheduleHead head;
  __shared__ bool ok;
  const DeviceTable* table = find_table(call);
  if (table == nullptr) return;
  const MoeContext context{call, *table, static_cast<int32_t>(blockIdx.x)};
  const RankTables tables = context.tables();
  if (has_maps && threadIdx.x >= 32 && threadIdx.x < 64) make_bank_maps(context, maps);
  if (threadIdx.x == 0) {
    ok = wait(*table, Stage::kDispatch, context.rank(), context.generation(), context.layer());
    stamp_ns(call, MoeStamp::kDispatchNs);
  }
  __syncthreads();
  if (!ok) {
    if (threadIdx.x == 0) *tables.head = {};
    return;
  }
  const SlotSpace& slots = call.sizes.slots;
  const int32_t stride = slots.stride(), ranks = slots.num_ranks, runs = call.sizes.num_runs();
  for (int32_t run = threadIdx.x; run < runs; run += kScheduleThreads) {
    const int32_t slot = context.rank() * stride + run / ranks;
    const int32_t* starts = context.block(run % ranks).section<int32_t>(Section::kSendStarts);
    const int32_t start = __ldcg(starts + slot);
    tables.run_start[run] = start;
    tables.run_first[run] = __ldcg(starts + slot + 1) - start;
  }
  __syncthreads();
  scan_in_place(tables.run_first, runs);
  for (int32_t slot = threadIdx.x; slot <= stride; slot += kScheduleThreads) {
    slot_first[slot] = tables.run_first[slot * ranks];
  }
  __syncthreads();
  Segment* const made = is_shared ? reinterpret_cast<Segment*>(shared_segments) : tables.segments;
  if (threadIdx.x == 0) {
    const int32_t lag = call.max_ctas_per_rank / call.sizes.cluster_size;
    head = build_schedule(call.sizes, slot_first, lag, made, tables.first_block, tables.wave_tiles);
    *tables.head = head;
  }
  __syncthreads();
  if (!is_shared) return;
  for (int32_t i = threadIdx.x; i < head.num_segments; i += kScheduleThreads) {
    tables.segments[i] = made[i];
  }
}

}  // namespace iser::cuda
