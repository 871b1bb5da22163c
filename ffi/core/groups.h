// Aligned groups (paper section 4.2): level l splits the ranks into 2^l sets of consecutive ranks.
#pragma once

#include <cstdint>

#include "ffi/core/expert.h"

namespace iser {

ISER_HD inline int32_t num_group_levels(int32_t num_ranks, int32_t min_group_size) {
  int32_t levels = 1;
  while (num_ranks % (1 << levels) == 0 && (num_ranks >> levels) >= min_group_size) ++levels;
  return levels;
}

struct Group {
  int32_t begin;  // first member
  int32_t end;    // one past the last member

  ISER_HD int32_t size() const { return end - begin; }
  ISER_HD bool contains(int32_t rank) const { return begin <= rank && rank < end; }
  ISER_HD bool meets(const Group& other) const { return begin < other.end && other.begin < end; }
  ISER_HD bool operator==(const Group& other) const {
    return begin == other.begin && end == other.end;
  }
};

ISER_HD inline Group aligned_group(int32_t num_ranks, int32_t level, int32_t group_idx) {
  const int32_t size = num_ranks >> level;
  return {group_idx * size, (group_idx + 1) * size};
}

}  // namespace iser
