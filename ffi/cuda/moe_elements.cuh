// Elements of x and y in words of sixteen bytes.
#pragma once

#include <cstdint>

#include "ffi/cuda/moe_mma.cuh"

namespace iser::cuda {

// Sixteen bytes of elements as f32.
struct F32x4 {
  static constexpr int kCount = 4;
  __device__ static void read(const uint4& words, float (&values)[kCount]) {
    values[0] = __uint_as_float(words.x), values[1] = __uint_as_float(words.y);
    values[2] = __uint_as_float(words.z), values[3] = __uint_as_float(words.w);
  }
  __device__ static uint4 write(const float (&values)[kCount]) {
    return {__float_as_uint(values[0]), __float_as_uint(values[1]), __float_as_uint(values[2]),
            __float_as_uint(values[3])};
  }
};

struct Bf16x8 {
  static constexpr int kCount = 8;
  __device__ static void read(const uint4& words, float (&values)[kCount]) {
    const uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = __uint_as_float(pairs[i] << 16);
      values[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  }
  __device__ static uint4 write(const float (&values)[kCount]) {
    return {pack_bf16(values[0], values[1]), pack_bf16(values[2], values[3]),
            pack_bf16(values[4], values[5]), pack_bf16(values[6], values[7])};
  }
};

}  // namespace iser::cuda
