// What the devices of a Domain share, and how their kernels arrive and wait.
//
// Each device owns one head (its arrival counters, abort cell and mail) and the blocks of its
// ranks, laid out by ffi/core/layout.h; peers reach both through a DeviceTable in their own memory.
// The meaning of stages, counters and words is that of ffi/core/protocol.h. Generations are counted
// in device memory by the plan kernel, so that a captured and replayed program stays right.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ffi/core/haloq.h"
#include "ffi/core/layout.h"
#include "ffi/core/protocol.h"

namespace iser::cuda {

constexpr int kRankThreads = 128;  // of a CTA with a thread per rank
static_assert(kRankThreads >= kMaxRanks, "a thread per rank");
constexpr int kMaxDevices = 128;

// Head of a device's symmetric memory; its mail follows (see below). Zero before the first call.
struct DeviceHead {
  ProcessWords words;               // peers raise the arrivals and write errors here
  alignas(64) uint32_t generation;  // of the last plan of this device; no peer touches it
};

// Mail, two copies by generation parity: every rank stores its call tag and its counts to every
// device, then arrives at Stage::kCounts there. A copy is stored again two generations later, when
// its owner's next plan, and so all that ran before it on COPY, has passed.
struct alignas(64) MailTag {
  CallTag tag;
};

ISER_HD inline size_t mail_bytes(const DomainShape& shape) {
  const size_t ranks = shape.slots.num_ranks, experts = shape.slots.num_experts;
  return align_up(ranks * (sizeof(MailTag) + sizeof(int32_t) * experts), kBlockAlign);
}

ISER_HD inline size_t head_bytes(const DomainShape& shape) {
  return align_up(sizeof(DeviceHead), kBlockAlign) + 2 * mail_bytes(shape);
}

ISER_HD inline MailTag* mail_tags(const DomainShape& shape, DeviceHead* head, uint32_t generation) {
  uint8_t* mail = reinterpret_cast<uint8_t*>(head) + align_up(sizeof(DeviceHead), kBlockAlign);
  return reinterpret_cast<MailTag*>(mail + (generation & 1) * mail_bytes(shape));
}

// i32 [num_ranks, num_experts].
ISER_HD inline int32_t* mail_counts(const DomainShape& shape, DeviceHead* head,
                                    uint32_t generation) {
  return reinterpret_cast<int32_t*>(mail_tags(shape, head, generation) + shape.slots.num_ranks);
}

// Operands of a call that may change from run to run of a program.
struct CallParams {
  int32_t layer;
  int32_t weights_version;
  int32_t is_balanced;
};

// A plan's arrays, as `Plan` of jax_iser/plan/types.py has them.
struct PlanOutputs {
  int32_t* route_slot;      // [V*num_tokens, top_k]
  int32_t* broadcasts;      // [P*S, 6]
  int32_t* quota;           // [P*S, P]
  int32_t* num_broadcasts;  // []
  int32_t* load_before;     // [P]
  int32_t* load;            // [P]
  int32_t* status;          // [], an ErrorCode
  uint32_t* generation;     // []
};

// What start leaves on its device for the ops of the same call. No peer touches it.
struct CallState {
  CallParams params;
  int32_t is_in_flight;  // from start to the end of fused_moe
  uint32_t ctas_done;    // of the copy kernel; every launch leaves it zero
  uint32_t num_started;  // calls of this Domain: 0, 1, or 2 for more
};

// Moments of one call on one device, %globaltimer ns; 0 where it has not come to them.
struct CallTimes {
  uint32_t generation;
  int32_t layer;
  uint64_t started, planned, copy_begin, copy_end, fused_called, ready_seen, finished;
};
constexpr uint32_t kNumTimes = 4096;  // calls that a device remembers

// All addresses as this device sees them; in device memory, written once when the Domain is made.
struct DeviceTable {
  DomainShape shape;
  BlockLayout layout;
  int32_t num_devices;
  int32_t ranks_per_device;
  int32_t device;  // this one: holds ranks [first_rank, first_rank + ranks_per_device)
  int32_t first_rank;
  int32_t num_layers;
  uint64_t sizes;  // digest of the configuration; programs are compiled for one
  uint64_t timeout_ns;
  uint64_t startup_timeout_ns;  // for the first call
  CallState* call;
  int32_t* topk_ids;     // [V*max_tokens, top_k]: start's operand, which XLA may reuse
  PlanOutputs plan;      // of the call in flight
  uint8_t* slot_tables;  // one a bank, slot_table_bytes apart; null unless resident
  CallTimes* times;      // [kNumTimes], by generation
  uint64_t* stalls;      // [V, kNumStages] ns by which the next arrival comes late, for fault tests
  DeviceHead* heads[kMaxDevices];
  uint8_t* blocks[kMaxRanks];

  ISER_HD DeviceHead* head() const { return heads[device]; }
  ISER_HD BlockView block(int32_t rank) const { return {blocks[rank], &layout}; }
  ISER_HD CallTimes& times_of(uint32_t generation) const { return times[generation % kNumTimes]; }
};

// How programs name Domains: their operand's words are looked up in memory that a device keeps for
// as long as the process lives, so that words which outlive their Domain meet an empty entry.
constexpr int kMaxDomains = 256;  // open at once

struct Directory {
  struct Entry {
    uint32_t id;  // 0 for none
    const DeviceTable* table;
  };
  uint32_t mark;        // of the process
  uint32_t num_misuse;  // calls that named no open Domain of their sizes
  Entry entries[kMaxDomains];
};

// Handle and ticket words, u32 [4]: id, first rank of the device, mark, 0.
constexpr int kNumWords = 4;

// One call as its kernels find it, wherever they run; one of a ring that a device keeps.
struct CallCell {
  const DeviceTable* table;  // null where the operand named none
  CallParams params;
};

#if defined(__CUDACC__)

__device__ inline uint32_t load_acquire(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline uint32_t load_relaxed(const uint32_t* word) {
  uint32_t value;
  asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
  return value;
}

__device__ inline void store_release(uint32_t* word, uint32_t value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void store_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void add_release(uint32_t* word, uint32_t value) {
  asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline void add_relaxed(uint32_t* word, uint32_t value) {
  asm volatile("red.relaxed.sys.global.add.u32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

__device__ inline uint64_t global_ns() {
  uint64_t ns;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns)::"memory");
  return ns;
}

// The Domain that the words name, null where none of these sizes is open here.
__device__ inline const DeviceTable* find_table(const Directory* directory, const uint32_t* words,
                                                uint64_t sizes) {
  const uint32_t id = words[0];
  const Directory::Entry entry = directory->entries[id % kMaxDomains];
  if (id == 0 || entry.id != id || words[2] != directory->mark) return nullptr;
  const DeviceTable* table = entry.table;
  if (!table) return nullptr;
  const bool fits = table->sizes == sizes && static_cast<uint32_t>(table->first_rank) == words[1];
  return fits ? table : nullptr;
}

// How long a wait may take. Generations wrap around, so that the first call is not told by its own.
__device__ inline bool is_first_call(const DeviceTable& table) {
  return load_relaxed(&table.call->num_started) <= 1;
}
__device__ inline uint64_t wait_limit(const DeviceTable& table) {
  return is_first_call(table) ? table.startup_timeout_ns : table.timeout_ns;
}

__device__ inline bool has_failed(const DeviceTable& table) {
  return load_relaxed(&table.head()->words.aborted) != 0;
}

// Writes the error to every device and ends all waits; the first error on a device stays. One
// thread.
__device__ inline void fail(const DeviceTable& table, const ErrorWord& error) {
  for (int32_t d = 0; d < table.num_devices; ++d) {
    ProcessWords* words = &table.heads[d]->words;
    // 2 marks an error being written; 1 one that can be read.
    if (atomicCAS_system(&words->aborted, 0u, 2u) == 0u) {
      words->error = error;
      store_release(&words->aborted, 1);
    }
  }
}

// The code of the error, once whoever met it has written it, which its process may not live to do.
__device__ inline int32_t error_code(const DeviceTable& table) {
  const ProcessWords* words = &table.head()->words;
  const uint64_t begin = global_ns();
  while (load_acquire(&words->aborted) == 2 && global_ns() - begin < 1'000'000) {
  }
  const auto* code = reinterpret_cast<const uint32_t*>(&words->error.code);
  const int32_t found = static_cast<int32_t>(load_relaxed(code));
  return found != 0 ? found : static_cast<int32_t>(ErrorCode::kPeerDied);
}

// For fault tests: the rank's arrival comes as much later as asked for, once. One thread.
__device__ inline void stall(const DeviceTable& table, Stage stage, int32_t rank) {
  const int32_t stages = static_cast<int32_t>(Stage::kNumStages);
  uint64_t* late = table.stalls + (rank - table.first_rank) * stages + static_cast<int32_t>(stage);
  const uint64_t ns = *late, begin = global_ns();
  if (ns == 0) return;
  *late = 0;
  while (global_ns() - begin < ns && !has_failed(table)) {
  }
}

// One warp, after a barrier with all threads whose writes the arrival publishes: its release is
// cumulative over what that barrier has made visible to the lanes.
__device__ inline void arrive(const DeviceTable& table, Stage stage, int32_t rank,
                              uint32_t generation) {
  const int32_t lane = threadIdx.x % 32, index = static_cast<int32_t>(stage);
  if (lane == 0) {
    stall(table, stage, rank);
    store_relaxed(&table.block(rank).words()->arrived[index], generation);
  }
  __syncwarp();
  for (int32_t d = lane; d < table.num_devices; d += 32) {
    add_release(&table.heads[d]->words.arrivals[index], 1);
  }
}

// An arrival that publishes nothing: for a stage that this generation does not have. One warp.
__device__ inline void pass(const DeviceTable& table, Stage stage, int32_t rank,
                            uint32_t generation) {
  const int32_t lane = threadIdx.x % 32, index = static_cast<int32_t>(stage);
  if (lane == 0) store_relaxed(&table.block(rank).words()->arrived[index], generation);
  for (int32_t d = lane; d < table.num_devices; d += 32) {
    add_relaxed(&table.heads[d]->words.arrivals[index], 1);
  }
}

__device__ inline int32_t missing_rank(const DeviceTable& table, Stage stage, uint32_t generation) {
  for (int32_t r = 0; r < table.shape.slots.num_ranks; ++r) {
    const uint32_t* word = &table.block(r).words()->arrived[static_cast<int32_t>(stage)];
    if (!has_reached(load_relaxed(word), generation)) return r;
  }
  return -1;
}

// Until every rank has arrived: one thread; a barrier hands what it has acquired to the others.
// False once the Domain has failed; fails it at the limit. Never spins for longer.
__device__ inline bool wait(const DeviceTable& table, Stage stage, int32_t rank,
                            uint32_t generation, int32_t layer) {
  const ProcessWords* words = &table.head()->words;
  const uint32_t* word = &words->arrivals[static_cast<int32_t>(stage)];
  const uint32_t complete = generation * static_cast<uint32_t>(table.shape.slots.num_ranks);
  const uint64_t limit = wait_limit(table);
  const uint64_t begin = global_ns();
  for (;;) {
    const uint32_t aborted = load_relaxed(&words->aborted);
    if (has_reached(load_acquire(word), complete)) return aborted == 0;
    if (aborted != 0) return false;
    if (global_ns() - begin < limit) continue;
    fail(table,
         {static_cast<int32_t>(ErrorCode::kTimeout), rank, missing_rank(table, stage, generation),
          layer, static_cast<int32_t>(stage), generation, limit / 1'000'000, is_first_call(table)});
    return false;
  }
}

// Fails the Domain where rank r's plan, READY by now, is not that of this device's first rank.
__device__ inline void check_plan(const DeviceTable& table, int32_t r, uint32_t generation,
                                  int32_t layer) {
  const uint64_t expected = table.block(table.first_rank).words()->plan_hash;
  const uint64_t found = *const_cast<const volatile uint64_t*>(&table.block(r).words()->plan_hash);
  if (found == expected) return;
  fail(table, {static_cast<int32_t>(ErrorCode::kPlanMismatch), table.first_rank, r, layer,
               static_cast<int32_t>(Stage::kReady), generation, expected, found});
}

// Whether this CTA is the last of the grid to count itself. Called by all threads: what those of
// the others have written before is then visible to these, and a release of theirs publishes it.
__device__ inline bool is_last_cta(uint32_t* counter) {
  __shared__ bool is_last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;"
                 : "=r"(before)
                 : "l"(counter)
                 : "memory");
    is_last = before == gridDim.x - 1;
  }
  __syncthreads();
  return is_last;
}

#endif  // __CUDACC__

}  // namespace iser::cuda
