// bf16 as the sources use it; rounding to nearest even.
#pragma once

#include "cuda_runtime.h"

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float value);
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  const uint32_t bits = __float_as_uint(value);
  __nv_bfloat16 result;
  result.bits = value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return result;
}
inline __nv_bfloat16::__nv_bfloat16(float value) : bits(__float2bfloat16_rn(value).bits) {}
inline float __bfloat162float(__nv_bfloat16 value) {
  return __uint_as_float(static_cast<uint32_t>(value.bits) << 16);
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
