// A CTA's ring of slices: one thread loads them into shared memory, one stores them to every
// member, and two warps copy by ordinary stores what the copy engine cannot take.
#pragma once

#include <cstdint>

#include "ffi/core/slices.h"
#include "ffi/cuda/bulk_copy.cuh"
#include "ffi/cuda/replication.cuh"

namespace iser::cuda {

constexpr int kNumRings = 2;
constexpr int kNumStoring = 2;  // slices of a ring that may be on their way out
constexpr int kNumPlainThreads = 64, kFirstPlainThread = 64 * kNumRings;
constexpr int kThreads = kFirstPlainThread + kNumPlainThreads;

// What the loader tells the storer of a stage.
struct alignas(16) Descriptor {
  uint64_t target;  // in a block
  uint32_t bytes;   // 0 ends the stream
  int32_t row;
};

// What a CTA keeps in shared memory: the stages, their barriers, and copies of the tables that its
// roles read again and again.
struct SharedViews {
  uint8_t* stages;          // [kNumRings, num_stages, slice_bytes]
  Descriptor* descriptors;  // [kNumRings, num_stages]
  uint64_t* full;           // [kNumRings, num_stages], the slice has been loaded
  uint64_t* empty;          // [kNumRings, num_stages], the slice has been read out
  uint8_t** blocks;         // [num_ranks]
  BundleLayout* bundle;
  uint32_t* num_slices;             // [kMaxPlanes]
  uint64_t (*weights)[kMaxPlanes];  // [num_ranks], planes of the first home expert
  Broadcast* rows;                  // [max_broadcasts]
  size_t bytes;
};

__host__ __device__ inline SharedViews shared_views(const DomainShape& shape,
                                                    const ReplicationOptions& options,
                                                    uint8_t* base) {
  const size_t ranks = shape.slots.num_ranks;
  const size_t stages = static_cast<size_t>(kNumRings) * options.num_stages;
  SharedViews views;
  views.stages = base;
  views.descriptors = reinterpret_cast<Descriptor*>(base + stages * options.slice_bytes);
  views.full = reinterpret_cast<uint64_t*>(views.descriptors + stages);
  views.empty = views.full + stages;
  views.blocks = reinterpret_cast<uint8_t**>(views.empty + stages);
  views.bundle = reinterpret_cast<BundleLayout*>(views.blocks + ranks);
  views.weights = reinterpret_cast<uint64_t(*)[kMaxPlanes]>(views.bundle + 1);
  views.rows = reinterpret_cast<Broadcast*>(views.weights + ranks);
  views.num_slices = reinterpret_cast<uint32_t*>(views.rows + ranks * shape.slots.num_helper_slots);
  views.bytes = reinterpret_cast<uint8_t*>(views.num_slices + kMaxPlanes) - base;
  return views;
}

// One slice of a plane on its way to a group.
struct Slice {
  int32_t row;
  uint64_t source, target, bytes;  // of the plane; the target in a block
  PlaneCut cut;
  uint64_t begin;  // of the slice, in what the copy engine takes and in what it does not
};

// One ring's stages, and which of them a role is at.
struct Ring {
  uint8_t* stages;
  Descriptor* descriptors;
  uint64_t *full, *empty;
  int32_t slice_bytes, num_stages;
  int32_t at = 0;
  uint32_t parity = 0;

  __device__ Ring(const SharedViews& shared, const ReplicationOptions& options, int32_t ring)
      : slice_bytes(options.slice_bytes), num_stages(options.num_stages) {
    const int32_t first = ring * num_stages;
    stages = shared.stages + first * slice_bytes;
    descriptors = shared.descriptors + first;
    full = shared.full + first;
    empty = shared.empty + first;
  }

  __device__ uint8_t* stage() const { return stages + at * slice_bytes; }
  __device__ void advance() {
    if (++at == num_stages) {
      at = 0;
      parity ^= 1;
    }
  }
};

struct Context {
  const ReplicationLaunch& launch;
  const DeviceTable& table;
  uint32_t generation;
  SharedViews shared;
  int32_t num_rows, first_rank, ranks_per_device;
  uint64_t bank;  // where it begins in a block
  bool is_bulk;   // the copy engine can take every plane whole

  __device__ const DomainShape& shape() const { return launch.shape; }
  __device__ const ReplicationOptions& options() const { return launch.options; }

  // Calls visit(slice) for every slice of this worker, one of `num_workers`. One thread walks for a
  // whole ring, so what a plane's slices have in common is computed once.
  template <typename Visit>
  __device__ void for_each_slice(uint32_t worker, uint32_t num_workers, Visit visit) const {
    uint32_t index = worker;  // of the worker's next slice, in the list that comes
    for (int32_t b = 0; b < num_rows; ++b) {
      const Broadcast& row = shared.rows[b];
      const Share share =
          device_share(row, row.group(shape().slots.num_ranks), first_rank, ranks_per_device);
      for (uint32_t f = share.first; f < share.last; ++f) {
        uint32_t j = f + index * share.step;
        uint32_t begin = 0;  // the plane's first slice
        for (int32_t plane = 0; plane < shared.bundle->num_planes; ++plane) {
          Slice slice = first_slice(b, plane);
          const uint32_t end = begin + shared.num_slices[plane];
          for (; j < end; j += num_workers * share.step, index += num_workers) {
            slice.begin = static_cast<uint64_t>(j - begin) * options().slice_bytes;
            visit(slice);
          }
          begin = end;
        }
        index -= share.count(f, begin);
      }
    }
  }

  __device__ Slice first_slice(int32_t b, int32_t plane) const {
    const Broadcast& row = shared.rows[b];
    const PlaneLayout& layout = shared.bundle->planes[plane];
    const uint64_t source =
        shared.weights[row.owner][plane] + row.expert % shape().slots.num_home() * layout.bytes;
    const uint64_t target = bank + row.helper_idx * shared.bundle->bytes + layout.offset;
    return {b, source, target, layout.bytes, cut_plane(source, target, layout.bytes), 0};
  }

  // What the copy engine moves of the slice; 0 when there is nothing.
  __device__ uint32_t bulk_bytes(const Slice& slice) const {
    if (slice.begin >= slice.cut.body) return 0;
    const uint64_t left = slice.cut.body - slice.begin;
    return left < options().slice_bytes ? left : options().slice_bytes;
  }
};

// Fills the shared tables and reads what all threads need; ends with a barrier.
__device__ inline Context prepare(const ReplicationLaunch& launch, const DeviceTable& table,
                                  uint8_t* dynamic_shared) {
  const uint32_t generation = *table.plan.generation;
  const Broadcast* rows = reinterpret_cast<const Broadcast*>(table.plan.broadcasts);
  const DomainShape& shape = launch.shape;
  const SharedViews shared = shared_views(shape, launch.options, dynamic_shared);
  const MailTag* tags = mail_tags(shape, table.head(), generation);
  const int32_t bank = tags[table.first_rank].tag.layer % shape.num_banks;
  const int32_t max_rows = shape.slots.num_ranks * shape.slots.num_helper_slots;
  // One thread asks, for all: a failure that arrives meanwhile must not leave rows half filled.
  const bool is_off = __syncthreads_or(threadIdx.x == 0 && has_failed(table)) != 0;
  const int32_t planned = *table.plan.num_broadcasts;
  const int32_t num_rows = is_off ? 0 : planned < max_rows ? planned : max_rows;
  const BlockView origin{nullptr, &table.layout};
  const BundleLayout& bundle = table.layout.bundle;
  bool is_ragged = false;
  if (threadIdx.x == 0) *shared.bundle = bundle;
  if (threadIdx.x < bundle.num_planes) {
    const PlaneLayout& plane = bundle.planes[threadIdx.x];
    shared.num_slices[threadIdx.x] = num_slices(plane, launch.options.slice_bytes);
    is_ragged = plane.bytes % kBulkAlign != 0;
  }
  for (int32_t b = threadIdx.x; b < num_rows; b += kThreads) shared.rows[b] = rows[b];
  for (int32_t r = threadIdx.x; r < shape.slots.num_ranks; r += kThreads) {
    shared.blocks[r] = table.blocks[r];
    for (int32_t i = 0; i < bundle.num_planes; ++i) {
      shared.weights[r][i] = tags[r].tag.weights[i];
      is_ragged |= tags[r].tag.weights[i] % kBulkAlign != 0;
    }
  }
  if (threadIdx.x < kNumRings * launch.options.num_stages) {
    mbarrier_init(&shared.full[threadIdx.x], 1);
    mbarrier_init(&shared.empty[threadIdx.x], 1);
    fence_mbarrier_init();
  }
  const bool is_bulk = __syncthreads_or(is_ragged) == 0;
  return {launch,
          table,
          generation,
          shared,
          num_rows,
          table.first_rank,
          table.ranks_per_device,
          reinterpret_cast<uint64_t>(origin.helper(shape, bank, 0)),
          is_bulk};
}

__device__ inline void load_slices(const Context& context, int32_t ring_idx) {
  Ring ring(context.shared, context.options(), ring_idx);
  fence_async_proxy();  // weights were written by ordinary stores
  const auto load = [&](const Slice& slice) {
    const uint32_t bytes = context.bulk_bytes(slice);
    if (bytes == 0) return;
    const uint64_t begin = slice.cut.head + slice.begin;
    mbarrier_wait(&ring.empty[ring.at], ring.parity ^ 1);  // passes at once in the first round
    ring.descriptors[ring.at] = {slice.target + begin, bytes, slice.row};
    mbarrier_arrive_expect(&ring.full[ring.at], bytes);
    bulk_load(ring.stage(), reinterpret_cast<const void*>(slice.source + begin), bytes,
              &ring.full[ring.at]);
    ring.advance();
  };
  context.for_each_slice(blockIdx.x * kNumRings + ring_idx, gridDim.x * kNumRings, load);
  mbarrier_wait(&ring.empty[ring.at], ring.parity ^ 1);
  ring.descriptors[ring.at] = {0, 0, 0};
  mbarrier_arrive(&ring.full[ring.at]);
}

// Stores stay in flight while the next ones are issued: a stage is handed back kNumStoring slices
// later.
template <class Fabric>
__device__ void store_slices(const Context& context, int32_t ring_idx, uint8_t* const* windows) {
  Ring ring(context.shared, context.options(), ring_idx);
  Broadcast row{};
  Group group{};
  int32_t row_idx = -1, num_out = 0, oldest = 0;
  for (;;) {
    mbarrier_wait(&ring.full[ring.at], ring.parity);
    const Descriptor slice = ring.descriptors[ring.at];
    if (slice.bytes == 0) break;
    if (slice.row != row_idx) {
      row_idx = slice.row;
      row = context.shared.rows[row_idx];
      group = row.group(context.shape().slots.num_ranks);
    }
    Fabric::store(row, group, context.shared.blocks, windows, slice.target, ring.stage(),
                  slice.bytes);
    bulk_commit();
    ring.advance();
    if (num_out < kNumStoring) {
      ++num_out;
      continue;
    }
    bulk_wait_read<kNumStoring>();
    mbarrier_arrive(&ring.empty[oldest]);
    oldest = oldest + 1 == ring.num_stages ? 0 : oldest + 1;
  }
  bulk_wait_written();
  fence_async_proxy();  // before the release in `publish`
}

// Bytes [begin, end) of the plane to every member but the owner.
template <typename Word>
__device__ void copy_words(const Context& context, const Slice& slice, uint64_t begin,
                           uint64_t end) {
  const Broadcast& row = context.shared.rows[slice.row];
  const Group group = row.group(context.shape().slots.num_ranks);
  for (uint64_t i = begin + (threadIdx.x - kFirstPlainThread) * sizeof(Word); i < end;
       i += kNumPlainThreads * sizeof(Word)) {
    const Word word = *reinterpret_cast<const Word*>(slice.source + i);
    for (int32_t r = group.begin; r < group.end; ++r) {
      if (r == row.owner) continue;
      *reinterpret_cast<Word*>(context.shared.blocks[r] + slice.target + i) = word;
    }
  }
}

__device__ inline void copy_bytes(const Context& context, const Slice& slice, uint64_t begin,
                                  uint64_t end) {
  if (begin >= end) return;
  const uint64_t mixed = slice.source | slice.target | begin | end;
  if (mixed % 4 == 0) {
    copy_words<uint32_t>(context, slice, begin, end);
  } else if (mixed % 2 == 0) {
    copy_words<uint16_t>(context, slice, begin, end);
  } else {
    copy_words<uint8_t>(context, slice, begin, end);
  }
}

// Both ends of a plane that stick out of whole words, or all of one that is not aligned.
__device__ inline void copy_plain(const Context& context) {
  context.for_each_slice(blockIdx.x, gridDim.x, [&](const Slice& slice) {
    const PlaneCut& cut = slice.cut;
    if (cut.body == slice.bytes) return;
    const uint64_t slice_end = slice.begin + context.options().slice_bytes;
    const uint64_t end = slice_end < slice.bytes ? slice_end : slice.bytes;
    const uint64_t body_end = cut.head + cut.body;
    copy_bytes(context, slice, slice.begin, end < cut.head ? end : cut.head);
    copy_bytes(context, slice, slice.begin > body_end ? slice.begin : body_end, end);
  });
}

}  // namespace iser::cuda
