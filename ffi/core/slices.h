// Which slices of which planes a rank or a device moves, and how each is cut for a copy engine.
//
// A bundle's slices are numbered plane by plane; the last slice of a plane may be short. Everyone
// walks the same numbered list; nothing is stored. Owner-direct gives all slices of a row to its
// owner; SAMI gives slices j = i (mod g) to member i of g.
#pragma once

#include <cstdint>

#include "ffi/core/bundle.h"
#include "ffi/core/groups.h"
#include "ffi/core/haloq_types.h"

namespace iser {

// The slices j = f (mod step) for f in [first, last).
struct Share {
  uint32_t step, first, last;

  // Of those with remainder f, how many there are below `total`.
  ISER_HD uint32_t count(uint32_t f, uint32_t total) const {
    return total > f ? (total - f - 1) / step + 1 : 0;
  }
};

// What the device with ranks [first_rank, first_rank + num_local) moves of a row.
ISER_HD inline Share device_share(const Broadcast& row, Group group, int32_t first_rank,
                                  int32_t num_local) {
  const Group local{first_rank, first_rank + num_local};
  const Share none{1, 0, 0}, whole{1, 0, 1};
  switch (static_cast<CopyWay>(row.how)) {
    case CopyWay::kOwnerDirect:
      return local.contains(row.owner) ? whole : none;
    case CopyWay::kSami: {
      const int32_t begin = group.begin > local.begin ? group.begin : local.begin;
      const int32_t end = group.end < local.end ? group.end : local.end;
      if (begin >= end) return none;
      if (end - begin == group.size()) return whole;
      return {static_cast<uint32_t>(group.size()), static_cast<uint32_t>(begin - group.begin),
              static_cast<uint32_t>(end - group.begin)};
    }
    default:
      return none;  // resident: already there
  }
}

// A plane's bytes: whole 16-byte words between `head` and `head + body` go through the copy engine,
// what sticks out by ordinary stores. Where source and target differ modulo 16, all of it does.
struct PlaneCut {
  uint32_t head;
  uint64_t body;
};

ISER_HD inline PlaneCut cut_plane(uint64_t source, uint64_t target, uint64_t bytes) {
  if ((source ^ target) % 16 != 0) return {0, 0};
  const uint64_t head = (16 - source % 16) % 16;
  if (head > bytes) return {0, 0};
  return {static_cast<uint32_t>(head), (bytes - head) / 16 * 16};
}

ISER_HD inline uint32_t num_slices(const PlaneLayout& plane, uint32_t slice_bytes) {
  return static_cast<uint32_t>((plane.bytes + slice_bytes - 1) / slice_bytes);
}

ISER_HD inline uint32_t num_slices(const BundleLayout& bundle, uint32_t slice_bytes) {
  uint32_t count = 0;
  for (int32_t i = 0; i < bundle.num_planes; ++i)
    count += num_slices(bundle.planes[i], slice_bytes);
  return count;
}

struct PlaneSlice {
  int32_t plane;
  size_t begin, bytes;  // in the plane
};

// Slice `index` of the bundle, below num_slices.
ISER_HD inline PlaneSlice slice_at(const BundleLayout& bundle, uint32_t index,
                                   uint32_t slice_bytes) {
  int32_t plane = 0;
  for (uint32_t count; index >= (count = num_slices(bundle.planes[plane], slice_bytes)); ++plane) {
    index -= count;
  }
  const size_t begin = static_cast<size_t>(index) * slice_bytes;
  const size_t left = bundle.planes[plane].bytes - begin;
  return {plane, begin, left < slice_bytes ? left : slice_bytes};
}

}  // namespace iser
