// Tokens in FP8: the records that are dispatched (ffi/core/fp8.h).
#pragma once

#include <cmath>
#include <cstring>

#include "ffi/core/fp8.h"

namespace iser::cpu {

// `Element` reads what the row is made of as f32.
template <typename Element>
void quantize_row(const typename Element::Stored* row, int32_t columns, uint8_t* record) {
  uint8_t* scales = record + fp8::plane_values(1, columns);
  for (int32_t first = 0; first < columns; first += fp8::kBlock, scales += sizeof(float)) {
    const int32_t count = columns - first < fp8::kBlock ? columns - first : fp8::kBlock;
    float values[fp8::kBlock], amax = 0.0f;
    for (int32_t i = 0; i < count; ++i) {
      values[i] = Element::read(row[first + i]);
      const float magnitude = std::fabs(values[i]);
      amax = magnitude > amax ? magnitude : amax;  // a NaN has none
    }
    const fp8::Scale scale = fp8::Scale::of(amax);
    for (int32_t i = 0; i < count; ++i) {
      record[first + i] = fp8::to_e4m3(values[i] * scale.up);
    }
    std::memcpy(scales, &scale.down, sizeof(float));
  }
}

inline void dequantize_row(const uint8_t* record, int32_t columns, float* row) {
  const uint8_t* scales = record + fp8::plane_values(1, columns);
  for (int32_t first = 0; first < columns; first += fp8::kBlock, scales += sizeof(float)) {
    float scale;
    std::memcpy(&scale, scales, sizeof(float));
    const int32_t last = columns - first < fp8::kBlock ? columns : first + fp8::kBlock;
    for (int32_t i = first; i < last; ++i) {
      row[i] = fp8::from_e4m3(record[i]) * scale;
    }
  }
}

}  // namespace iser::cpu
