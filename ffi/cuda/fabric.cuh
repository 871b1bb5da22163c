// How a slice in shared memory reaches the members of a group: the leaf under the replication
// kernel, one struct a fabric. `offset` counts from the start of a rank's block; it is the same on
// every rank.
#pragma once

#include <cstdint>

#include "ffi/core/groups.h"
#include "ffi/core/haloq.h"
#include "ffi/cuda/bulk_copy.cuh"

namespace iser::cuda {

// A store a member. The owner computes at home: its own helper slot is left as it is.
struct UnicastFabric {
  __device__ static void store(const Broadcast& row, Group group, uint8_t* const* blocks,
                               uint8_t* const*, uint64_t offset, const void* shared,
                               uint32_t bytes) {
#pragma unroll 1
    for (int32_t r = group.begin; r < group.end; ++r) {
      if (r != row.owner) bulk_store(blocks[r] + offset, shared, bytes);
    }
  }
};

// PTX has had this store since version 9.1 (CUDA 13.1).
#if defined(ISER_MULTICAST_PTX) || (__CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1301)
#define ISER_HAS_MULTICAST 1

// One store to the multicast address of the group; the switch writes it to every member, the owner
// too if it is one (it has spent that helper slot, and reads its own copy at home).
struct MulticastFabric {
  // `windows` are the multicast addresses of the blocks of the aligned groups, coarse to fine.
  __device__ static void store(const Broadcast& row, Group, uint8_t* const*,
                               uint8_t* const* windows, uint64_t offset, const void* shared,
                               uint32_t bytes) {
    uint8_t* global = windows[(1 << row.level) - 1 + row.group_idx] + offset;
    asm volatile("multimem.cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(
                     __cvta_generic_to_global(global)),
                 "r"(shared_address(shared)), "r"(bytes)
                 : "memory");
  }
};
#endif

}  // namespace iser::cuda
