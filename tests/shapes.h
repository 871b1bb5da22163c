// Sizes of Domains for tests and benchmarks.
#pragma once

#include "ffi/core/layout.h"

namespace iser {

// Weights, tokens and outputs in elements of one type, without biases, with SiLU.
inline DomainShape make_shape(SlotSpace slots, int32_t top_k, int32_t hidden, int32_t intermediate,
                              int32_t max_tokens, int32_t element_bytes, int32_t num_banks,
                              int32_t num_staged = 0) {
  DomainShape shape{};
  shape.slots = slots;
  shape.top_k = top_k;
  shape.hidden = hidden;
  shape.intermediate = intermediate;
  shape.max_tokens = max_tokens;
  shape.element_bytes = element_bytes;
  shape.num_banks = num_banks;
  shape.num_staged = num_staged;
  const bool is_f32 = element_bytes == sizeof(float);
  shape.weight_format = is_f32 ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
  shape.token_format = is_f32 ? TokenFormat::kFloat32 : TokenFormat::kBFloat16;
  return shape;
}

// The same with weights and dispatched tokens in FP8.
inline DomainShape in_fp8(DomainShape shape) {
  shape.weight_format = WeightFormat::kFloat8Block128;
  shape.token_format = TokenFormat::kFloat8Row128;
  return shape;
}

}  // namespace iser
