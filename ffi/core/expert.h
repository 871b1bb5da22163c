// The slot arithmetic and the one validity check that every op uses.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define ISER_HD __host__ __device__
#else
#define ISER_HD
#endif

namespace iser {

// Ids outside [0, num_experts) are padding: such a route gets slot -1 and contributes nothing.
ISER_HD inline bool is_valid_expert(int32_t expert, int32_t num_experts) {
  return static_cast<uint32_t>(expert) < static_cast<uint32_t>(num_experts);
}

// Physical slots: rank r holds its home experts in [r*stride, r*stride + num_home) and its helper
// slots after them.
struct SlotSpace {
  int32_t num_ranks;
  int32_t num_experts;
  int32_t num_helper_slots;

  ISER_HD int32_t num_home() const { return num_experts / num_ranks; }
  ISER_HD int32_t stride() const { return num_home() + num_helper_slots; }
  ISER_HD int32_t num_slots() const { return num_ranks * stride(); }
  ISER_HD int32_t owner(int32_t expert) const { return expert / num_home(); }
  ISER_HD int32_t home_slot(int32_t expert) const {
    return owner(expert) * stride() + expert % num_home();
  }
  ISER_HD int32_t helper_slot(int32_t rank, int32_t helper_idx) const {
    return rank * stride() + num_home() + helper_idx;
  }
};

}  // namespace iser
