// FP8: e4m3 values with f32 scales of blocks, in weights and in rows of activations.
//
// A plane of weights [rows, columns] has a scale for each block of 128 x 128; behind its values lie
// the scales [ceil(rows / 128), ceil(columns / 128)]. A row of activations has a scale for each 128
// columns; a dispatched token is its values, then its scales.
//
//   scale = amax / 448, value = e4m3(x * (448 / amax)), amax at least kMinAmax
//
// in f32, each operation rounded to nearest even, so that every platform has the same bits. A NaN,
// or an infinity, makes what is computed from its block NaN.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "ffi/core/expert.h"

namespace iser::fp8 {

constexpr int32_t kBlock = 128;
constexpr float kMax = 448.0f;
constexpr float kMinAmax = 7.888609e-31f;  // 2^-100: 448 / amax stays finite

ISER_HD constexpr int32_t num_blocks(int32_t columns) { return (columns + kBlock - 1) / kBlock; }

// Where the scales begin behind the values of a plane or of a token.
ISER_HD constexpr size_t plane_values(int32_t rows, int32_t columns) {
  return (static_cast<size_t>(rows) * columns + 15) / 16 * 16;
}

ISER_HD constexpr size_t plane_bytes(int32_t rows, int32_t columns) {
  const size_t bytes = plane_values(rows, columns) +
                       sizeof(float) * num_blocks(rows) * static_cast<size_t>(num_blocks(columns));
  return (bytes + 127) / 128 * 128;
}

ISER_HD constexpr size_t token_bytes(int32_t columns) {
  return (plane_values(1, columns) + sizeof(float) * num_blocks(columns) + 15) / 16 * 16;
}

struct Scale {
  float up;    // of values, 448 / amax
  float down;  // of what is stored, amax / 448

  ISER_HD static Scale of(float amax) {
    const float most = amax > kMinAmax ? amax : kMinAmax;  // kMinAmax for NaN
    return {kMax / most, most / kMax};
  }
};

// To the nearest e4m3, ties to even; beyond 448 to 448, NaN to NaN. For hosts.
inline uint8_t to_e4m3(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const uint8_t sign = bits >> 24 & 0x80;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7f;
  if (bits >= 0x43e00000) return sign | 0x7e;  // 448 and more
  if (bits < 0x3c800000) {                     // below 2^-6: multiples of 2^-9
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof bits);
    const float shifted = magnitude + 16384.0f;  // whose last bit is 2^-9
    std::memcpy(&bits, &shifted, sizeof bits);
    return sign | static_cast<uint8_t>(bits - 0x46800000);
  }
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | static_cast<uint8_t>((bits >> 20) - (120 << 3));
}

inline float from_e4m3(uint8_t code) {
  const int32_t exponent = code >> 3 & 15, fraction = code & 7;
  float value;
  if ((code & 0x7f) == 0x7f) {
    const uint32_t nan = 0x7fc00000;
    std::memcpy(&value, &nan, sizeof value);
    return value;
  }
  if (exponent == 0) {
    value = static_cast<float>(fraction) / 512.0f;
  } else {
    const uint32_t bits =
        static_cast<uint32_t>(exponent + 120) << 23 | static_cast<uint32_t>(fraction) << 20;
    std::memcpy(&value, &bits, sizeof value);
  }
  return code & 0x80 ? -value : value;
}

}  // namespace iser::fp8
