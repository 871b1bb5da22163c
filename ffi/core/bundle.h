// What an expert is made of: the planes of a bundle, described once for host, device and Python.
//
// A plane is one array that the user holds, [experts, rows, columns] or [experts, bytes], stacked
// [layers, experts, ...] too. Its share of one expert is contiguous: `bytes` long, values first and
// scales behind them where the format has any. In a helper slot the planes of one expert follow
// each other at `offset`. Replication moves bytes and asks for nothing else.
//
// Formats of weights:
//
//   float32, bfloat16  elements, row by row
//   float8_block128    e4m3 with an f32 scale for each 128 x 128 block (ffi/core/fp8.h)
//
// Biases are f32 in every format: [intermediate] of gate and of up, [hidden] of down.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/expert.h"
#include "ffi/core/fp8.h"
#include "ffi/core/limits.h"

namespace iser {

// In the order of jax_iser/experts/formats.
enum class WeightFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat8Block128 = 2 };
constexpr int32_t kNumWeightFormats = 3;

// What is dispatched of a token.
enum class TokenFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat8Row128 = 2 };
constexpr int32_t kNumTokenFormats = 3;

constexpr size_t kPlaneAlign = 128;

ISER_HD constexpr size_t align_up(size_t bytes, size_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// The order of a bundle's planes, and of the weight operands of the calls.
enum PlaneIndex : int32_t {
  kGatePlane = 0,
  kUpPlane = 1,
  kDownPlane = 2,
  kGateBiasPlane = 3,
  kUpBiasPlane = 4,
  kDownBiasPlane = 5,
};
constexpr int32_t kNumWeightPlanes = 3;  // those in the weight format; biases follow them

inline const char* plane_name(int32_t plane) {
  constexpr const char* kNames[kMaxPlanes] = {"gate",      "up",      "down",
                                              "gate_bias", "up_bias", "down_bias"};
  return kNames[plane];
}

// What the user's array is made of.
enum class PlaneType : int32_t { kFloat32 = 0, kBFloat16 = 1, kBytes = 2 };

struct PlaneLayout {
  int32_t rows, columns;  // of one expert; a bias has one row
  int32_t element_bits;
  int32_t scale_block;   // 0: no scales; else one scale for scale_block x scale_block values
  size_t offset;         // in the bundle, a multiple of kPlaneAlign
  size_t bytes;          // of one expert in the user's array
  size_t scales_offset;  // where its scales begin; `bytes` where there are none
  PlaneType type;        // of the user's array
  int32_t num_dims;      // of one expert in it: [rows, columns], or 1 for bytes and biases
};

struct BundleLayout {
  int32_t num_planes;
  size_t bytes;  // of a helper slot, a multiple of kPlaneAlign
  PlaneLayout planes[kMaxPlanes];
};

ISER_HD constexpr int32_t element_bits_of(WeightFormat format) {
  return format == WeightFormat::kFloat32 ? 32 : format == WeightFormat::kBFloat16 ? 16 : 8;
}

ISER_HD inline PlaneLayout weight_plane(WeightFormat format, int32_t rows, int32_t columns) {
  PlaneLayout plane{};
  plane.rows = rows;
  plane.columns = columns;
  plane.element_bits = element_bits_of(format);
  if (format == WeightFormat::kFloat8Block128) {
    plane.scale_block = fp8::kBlock;
    plane.bytes = fp8::plane_bytes(rows, columns);
    plane.scales_offset = fp8::plane_values(rows, columns);
    plane.type = PlaneType::kBytes;
    plane.num_dims = 1;
  } else {
    plane.bytes = static_cast<size_t>(rows) * columns * (plane.element_bits / 8);
    plane.scales_offset = plane.bytes;
    plane.type = format == WeightFormat::kFloat32 ? PlaneType::kFloat32 : PlaneType::kBFloat16;
    plane.num_dims = 2;
  }
  return plane;
}

ISER_HD inline PlaneLayout bias_plane(int32_t columns) {
  const size_t bytes = sizeof(float) * static_cast<size_t>(columns);
  return {1, columns, 32, 0, 0, bytes, bytes, PlaneType::kFloat32, 1};
}

ISER_HD inline BundleLayout bundle_layout(WeightFormat format, int32_t hidden, int32_t intermediate,
                                          bool has_biases) {
  BundleLayout layout{};
  const auto add = [&layout](PlaneLayout plane) {
    plane.offset = layout.bytes;
    layout.planes[layout.num_planes++] = plane;
    layout.bytes = align_up(layout.bytes + plane.bytes, kPlaneAlign);
  };
  add(weight_plane(format, intermediate, hidden));
  add(weight_plane(format, intermediate, hidden));
  add(weight_plane(format, hidden, intermediate));
  if (has_biases) {
    add(bias_plane(intermediate));
    add(bias_plane(intermediate));
    add(bias_plane(hidden));
  }
  return layout;
}

ISER_HD inline size_t token_bytes_of(TokenFormat format, int32_t hidden) {
  if (format == TokenFormat::kFloat8Row128) return fp8::token_bytes(hidden);
  return static_cast<size_t>(hidden) * (format == TokenFormat::kFloat32 ? 4 : 2);
}

}  // namespace iser
