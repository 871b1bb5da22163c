// What the kernels of one fused_moe share: its parameters, counters within the device, and the
// waits on them.
#pragma once

#include <cstdint>

#include "ffi/cuda/bulk_copy.cuh"
#include "ffi/cuda/fused_moe.cuh"
#include "ffi/cuda/moe_schedule.cuh"

namespace iser::cuda {

// Kernel parameter.
struct MoeCall {
  FusedLaunch launch;
  MoeSizes sizes;
  MoeLayout layout;
  BlockLayout block;          // of every rank
  int32_t ctas_per_rank;      // of the expert kernel
  int32_t max_ctas_per_rank;  // those above it take SMs that the copy may want, see TileQueue

  ISER_HD MoeWorkspace workspace() const {
    return {sizes, layout, static_cast<uint8_t*>(launch.workspace)};
  }
  ISER_HD size_t row_bytes() const { return launch.shape.row_bytes(); }  // of x, y and results
  ISER_HD bool is_helper(int32_t slot) const { return slot >= sizes.slots.num_home(); }
};

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ inline uint32_t load_acquire_gpu(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void add_release_gpu(uint32_t* word, uint32_t value) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline const DeviceTable* find_table(const MoeCall& call) {
  return find_table(call.launch.directory, call.launch.ticket, call.launch.sizes);
}

__device__ inline bool has_come(const DeviceTable& table, Stage stage) {
  const uint32_t* word = &table.head()->words.arrivals[static_cast<int32_t>(stage)];
  const uint32_t ranks = table.shape.slots.num_ranks;
  return has_reached(load_acquire(word), *table.plan.generation * ranks);
}

// One rank of the device as its CTAs see it.
struct MoeContext {
  const MoeCall& call;
  const DeviceTable& table;
  int32_t local_idx;

  __device__ int32_t rank() const { return table.first_rank + local_idx; }
  // In the expert kernel: this CTA.
  __device__ bool is_extra() const {
    return static_cast<int32_t>(blockIdx.y) >= call.ctas_per_rank;
  }
  // An extra CTA keeps within a budget, and to rows that wait for no tile, so not for READY.
  __device__ bool may_work() const {
    return !is_extra() || call.launch.options.num_sms == 0 || has_come(table, Stage::kReady);
  }
  __device__ bool may_pull() const { return !is_extra() || has_one_wave(); }
  __device__ bool has_one_wave() const { return tables().head->num_rows <= call.sizes.wave_rows; }
  __device__ uint32_t generation() const { return *table.plan.generation; }
  __device__ int32_t layer() const { return table.call->params.layer; }
  __device__ RankCounters counters() const { return call.workspace().counters(local_idx); }
  __device__ RankTables tables() const { return call.workspace().tables(local_idx); }
  __device__ BlockView block(int32_t rank) const { return {table.blocks[rank], &call.block}; }
  // Of the slot among the weights' experts, or among the bundles of its rank's helper banks.
  __device__ int32_t expert(int32_t slot) const {
    const int32_t experts = call.sizes.ranks_per_device * call.sizes.slots.num_home();
    const int32_t first = call.launch.num_stacked > 0 ? layer() * experts : 0;
    return first + local_idx * call.sizes.slots.num_home() + slot;
  }
  __device__ int32_t bank() const { return layer() % call.launch.shape.num_banks; }
  __device__ int32_t helper_bundle(int32_t slot) const {
    const SlotSpace& slots = call.sizes.slots;
    return bank() * slots.num_helper_slots + slot - slots.num_home();
  }
  // A slot's plane of its bundle, at home or in the helper bank.
  __device__ const uint8_t* plane(int32_t slot, int32_t which) const {
    const PlaneLayout& layout = call.block.bundle.planes[which];
    if (call.is_helper(slot)) {
      return block(rank()).section<uint8_t>(Section::kBanks) +
             helper_bundle(slot) * call.block.bundle.bytes + layout.offset;
    }
    return static_cast<const uint8_t*>(call.launch.weights[which]) + expert(slot) * layout.bytes;
  }
  // Where a row's result goes.
  __device__ uint8_t* target(const RowSource& source) const {
    return block(source.rank).section<uint8_t>(Section::kCombine) +
           static_cast<size_t>(source.route) * call.row_bytes();
  }
};

__device__ inline void fail_at(const DeviceTable& table, ErrorCode code, int32_t rank, int32_t peer,
                               Stage stage, uint64_t expected, uint64_t found) {
  fail(table, {static_cast<int32_t>(code), rank, peer, table.call->params.layer,
               static_cast<int32_t>(stage), *table.plan.generation, expected, found});
}

// Until CTAs of this device have raised the counter to `target`. One thread. False once the Domain
// has failed. The limit only ends what would be a fault of this code, or of the device.
__device__ inline bool wait_count(const MoeContext& context, const uint32_t* counter,
                                  uint32_t target) {
  const uint64_t begin = global_ns(), limit = 2 * wait_limit(context.table);
  for (;;) {
    if (has_reached(load_acquire_gpu(counter), target)) return true;
    if (has_failed(context.table)) return false;
    if (global_ns() - begin < limit) continue;
    fail_at(context.table, ErrorCode::kTimeout, context.rank(), -1, Stage::kCombine,
            limit / 1'000'000, is_first_call(context.table));
    return false;
  }
}

__device__ inline void stamp_ns(const MoeCall& call, MoeStamp stamp) {
  if (call.launch.stamps == nullptr) return;
  unsigned long long* word =
      reinterpret_cast<unsigned long long*>(call.launch.stamps) + static_cast<int32_t>(stamp);
  const bool is_last = stamp == MoeStamp::kTilesEndNs || stamp == MoeStamp::kEndNs;
  if (is_last) {
    atomicMax(word, static_cast<unsigned long long>(global_ns()));
  } else {
    atomicCAS(word, 0ull, static_cast<unsigned long long>(global_ns()));
  }
}

__device__ inline void add_to_stamp(const MoeCall& call, MoeStamp stamp, uint32_t count) {
  if (call.launch.stamps == nullptr) return;
  atomicAdd(reinterpret_cast<unsigned long long*>(call.launch.stamps) + static_cast<int32_t>(stamp),
            static_cast<unsigned long long>(count));
}

// Hands out the numbers of a rank's tiles, and finds what a number stands for. One warp.
//
// The copy may wait for the SM of an extra CTA, so that one takes no tile that waits for READY
// until READY has come, and leaves where there are no others.
struct TileQueue {
  const MoeContext& context;
  RankTables tables;
  int32_t num_segments, num_items;
  int32_t at = 0;  // segment of the last tile; numbers only grow

  __device__ explicit TileQueue(const MoeContext& c)
      : context(c),
        tables(c.tables()),
        num_segments(tables.head->num_segments),
        num_items(tables.head->num_items) {}

  // One thread. INT32_MAX for none.
  __device__ int32_t claim() const {
    uint32_t* const next = context.counters().next_item;
    if (context.is_extra() && !has_come(context.table, Stage::kReady)) {
      return claim_below(next, static_cast<uint32_t>(tables.head->num_home_items));
    }
    return static_cast<int32_t>(atomicAdd(next, 1u));
  }

  __device__ static int32_t claim_below(uint32_t* next, uint32_t limit) {
    for (uint32_t item = load_relaxed(next); item < limit;) {
      const uint32_t found = atomicCAS(next, item, item + 1);
      if (found == item) return static_cast<int32_t>(item);
      item = found;
    }
    return INT32_MAX;
  }

  __device__ Tile find(int32_t item) {
    for (;;) {
      const int32_t index = at + static_cast<int32_t>(threadIdx.x % 32);
      const int32_t first =
          index < num_segments ? __ldcg(&tables.segments[index].first_item) : INT32_MAX;
      const int32_t passed = __popc(__ballot_sync(kAllLanes, first <= item));
      at += passed - 1;
      if (passed < 32) break;
    }
    const int4* words = reinterpret_cast<const int4*>(tables.segments + at);
    const int4 a = __ldcg(words), b = __ldcg(words + 1);
    const Segment segment{a.x, static_cast<Gemm>(a.y), a.z, a.w, b.x, b.y, b.z, b.w};
    return tile_of(context.call.sizes, segment, item);
  }
};

// SM clocks since `begin`; spans of more than two seconds wrap.
__device__ inline uint32_t clocks_now() { return static_cast<uint32_t>(clock64()); }

// The moment at which this device first sees every rank READY. One thread.
__device__ inline void note_ready(const DeviceTable& table) {
  auto* seen =
      reinterpret_cast<unsigned long long*>(&table.times_of(*table.plan.generation).ready_seen);
  atomicCAS(seen, 0ull, static_cast<unsigned long long>(global_ns()));
}

// Waits for what a tile reads; one thread, the one that then reads it.
struct TileGate {
  const MoeContext& context;
  bool is_ready = false;

  __device__ bool open(const Tile& tile) {
    const RankCounters counters = context.counters();
    const bool is_inner = tile.gemm == Gemm::kInner;
    uint32_t begin = clocks_now();
    bool ok = is_inner ? wait_count(context, counters.rows_done + tile.block, tile.num_rows)
                       : wait_count(context, counters.inner_done + tile.block,
                                    context.call.sizes.inner_tiles());
    add_to_stamp(context.call, is_inner ? MoeStamp::kWaitRows : MoeStamp::kWaitInner,
                 clocks_now() - begin);
    if (ok && !is_ready && context.call.is_helper(tile.slot)) {
      begin = clocks_now();
      ok = is_ready =
          wait(context.table, Stage::kReady, context.rank(), context.generation(), context.layer());
      note_ready(context.table);
      add_to_stamp(context.call, MoeStamp::kWaitReady, clocks_now() - begin);
    }
    return ok;
  }
};

// Publishes a tile that has been stored. One warp, behind a barrier with those who stored it: what
// they stored is part of what its releases publish.
__device__ inline void publish_tile(const MoeContext& context, const Tile& tile) {
  const int32_t lane = threadIdx.x % 32, ranks = context.call.sizes.slots.num_ranks;
  const RankCounters counters = context.counters();
  if (tile.column >= context.call.sizes.column_tiles(tile.gemm)) return;
  if (lane == 0 && context.is_extra()) add_to_stamp(context.call, MoeStamp::kExtraTiles, 1);
  if (tile.gemm == Gemm::kInner) {
    fence_async_proxy();  // TMA reads h
    if (lane == 0) add_release_gpu(counters.inner_done + tile.block, 1);
    return;
  }
  const int32_t* run_first = context.tables().run_first + tile.slot * ranks;
  const int32_t units = tile_units(context.call.sizes, tile.column);
  for (int32_t s = lane; s < ranks; s += 32) {
    const int32_t begin = at_least(run_first[s], tile.row);
    const int32_t end = at_most(run_first[s + 1], tile.row + tile.num_rows);
    if (begin < end) add_release(&context.block(s).words()->routes_done, (end - begin) * units);
  }
  if (lane == 0) add_release_gpu(counters.hidden_done + tile.wave, 1);
}

}  // namespace iser::cuda
