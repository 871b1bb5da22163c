// Byte layout of a rank's block of symmetric memory: the same offsets on every rank and process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/activation.h"
#include "ffi/core/bundle.h"
#include "ffi/core/expert.h"
#include "ffi/core/protocol.h"

namespace iser {

// Sizes of a Domain; every rank of it has the same.
struct DomainShape {
  SlotSpace slots;
  int32_t top_k;
  int32_t hidden;
  int32_t intermediate;
  int32_t max_tokens;     // of one rank
  int32_t element_bytes;  // of x and y
  int32_t num_banks;
  int32_t num_staged;  // bundles a rank can stage for other processes
  WeightFormat weight_format;
  TokenFormat token_format;
  bool has_biases;
  Activation activation;

  ISER_HD size_t max_routes() const { return static_cast<size_t>(max_tokens) * top_k; }
  ISER_HD BundleLayout bundle() const {
    return bundle_layout(weight_format, hidden, intermediate, has_biases);
  }
  ISER_HD size_t bundle_bytes() const { return bundle().bytes; }
  ISER_HD size_t row_bytes() const { return static_cast<size_t>(hidden) * element_bytes; }
  // What is dispatched of a token.
  ISER_HD size_t token_bytes() const { return token_bytes_of(token_format, hidden); }
  ISER_HD bool is_fp8() const { return weight_format == WeightFormat::kFloat8Block128; }
};

constexpr size_t kBlockAlign = 128;
constexpr size_t kGuardBytes = 64;  // behind each section, filled with kGuardByte
constexpr uint8_t kGuardByte = 0xA5;
constexpr int kNumSections = 8;

enum class Section : int {
  kWords = 0,       // RankWords
  kCounts = 1,      // i32 [2, num_experts], by generation parity
  kSendRoutes = 2,  // i32 [max_routes], route indices sorted by physical slot
  kSendStarts = 3,  // i32 [num_slots + 1], where each slot's routes start
  kTokens = 4,      // [max_tokens, token_bytes]
  kCombine = 5,     // [max_routes, hidden], expert outputs by route
  kBanks = 6,       // [num_banks, num_helper_slots] bundles
  kStage = 7,       // [num_staged] bundles
};

inline const char* section_name(Section section) {
  constexpr const char* kNames[kNumSections] = {"words",  "counts",  "send routes",  "send starts",
                                                "tokens", "combine", "helper banks", "staging"};
  return kNames[static_cast<int>(section)];
}

struct BlockLayout {
  BundleLayout bundle;  // of a helper slot and of a staged expert
  size_t offset[kNumSections];
  size_t bytes[kNumSections];
  size_t total;

  ISER_HD size_t guard(int section) const { return offset[section] + bytes[section]; }
};

ISER_HD inline BlockLayout block_layout(const DomainShape& shape) {
  const size_t slots = shape.slots.num_helper_slots;
  BlockLayout layout{};
  layout.bundle = shape.bundle();
  layout.bytes[0] = sizeof(RankWords);
  layout.bytes[1] = 2 * sizeof(int32_t) * shape.slots.num_experts;
  layout.bytes[2] = sizeof(int32_t) * shape.max_routes();
  layout.bytes[3] = sizeof(int32_t) * (shape.slots.num_slots() + 1);
  layout.bytes[4] = shape.token_bytes() * shape.max_tokens;
  layout.bytes[5] = shape.row_bytes() * shape.max_routes();
  layout.bytes[6] = layout.bundle.bytes * shape.num_banks * slots;
  layout.bytes[7] = layout.bundle.bytes * shape.num_staged;
  for (int i = 0; i < kNumSections; ++i) {
    layout.offset[i] = layout.total;
    layout.total = align_up(layout.total + layout.bytes[i] + kGuardBytes, kBlockAlign);
  }
  return layout;
}

// A process's segment: its words, then the blocks of its ranks in rank order.
ISER_HD inline size_t segment_bytes(const DomainShape& shape, int32_t num_local_ranks) {
  return align_up(sizeof(ProcessWords), kBlockAlign) + block_layout(shape).total * num_local_ranks;
}

// One rank's block in this process's address space.
struct BlockView {
  uint8_t* base;
  const BlockLayout* layout;

  template <typename T>
  ISER_HD T* section(Section section) const {
    return reinterpret_cast<T*>(base + layout->offset[static_cast<int>(section)]);
  }
  ISER_HD RankWords* words() const { return section<RankWords>(Section::kWords); }
  ISER_HD int32_t* counts(const DomainShape& shape, uint32_t generation) const {
    return section<int32_t>(Section::kCounts) + (generation & 1) * shape.slots.num_experts;
  }
  ISER_HD uint8_t* helper(const DomainShape& shape, int32_t bank, int32_t helper_idx) const {
    return section<uint8_t>(Section::kBanks) +
           (static_cast<size_t>(bank) * shape.slots.num_helper_slots + helper_idx) *
               layout->bundle.bytes;
  }
  ISER_HD uint8_t* staged(int32_t index) const {
    return section<uint8_t>(Section::kStage) + index * layout->bundle.bytes;
  }
};

}  // namespace iser
