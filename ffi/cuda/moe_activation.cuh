// h = act(gate, up) of ffi/core/activation.h for the epilogues of the tensor engine, with the
// GPU's fast exponential and division. One type per activation, so that the choice is made once per
// tile and not per element.
#pragma once

#include "ffi/core/activation.h"

namespace iser::cuda {

constexpr float kLog2E = 1.4426950409f;

// 2^x and 1 / x to about 2^-22 of them; subnormal results are zero.
__device__ inline float fast_exp2(float x) {
  float value;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

__device__ inline float fast_reciprocal(float x) {
  float value;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(value) : "f"(x));
  return value;
}

// The smaller and the larger; NaN where either is.
__device__ inline float min_or_nan(float a, float b) {
  float value;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}

__device__ inline float max_or_nan(float a, float b) {
  float value;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(value) : "f"(a), "f"(b));
  return value;
}

struct Silu {
  __device__ explicit Silu(const Activation&) {}
  __device__ float operator()(float gate, float up) const {
    return __fdividef(gate, 1.0f + __expf(-gate)) * up;
  }
};

struct GeluTanh {
  __device__ explicit GeluTanh(const Activation&) {}
  __device__ float operator()(float gate, float up) const {
    constexpr float kLinear = -kGeluInner * kLog2E, kCubic = kLinear * kGeluCubic;
    const float exponent = gate * __fmaf_rn(kCubic, gate * gate, kLinear);
    return gate * fast_reciprocal(1.0f + fast_exp2(exponent)) * up;
  }
};

struct ClampedSwiglu {
  float limit, exponent, offset;

  __device__ explicit ClampedSwiglu(const Activation& activation)
      : limit(activation.limit), exponent(-kLog2E * activation.alpha), offset(activation.offset) {}
  __device__ float operator()(float gate, float up) const {
    const float g = min_or_nan(gate, limit);
    const float u = max_or_nan(min_or_nan(up, limit), -limit);
    return g * fast_reciprocal(1.0f + fast_exp2(exponent * g)) * (u + offset);
  }
};

// Calls `visit` with the activation's type.
template <class Visit>
__device__ inline void with_activation(const Activation& activation, const Visit& visit) {
  switch (activation.kind) {
    case ActivationKind::kSilu:
      return visit(Silu(activation));
    case ActivationKind::kGeluTanh:
      return visit(GeluTanh(activation));
    case ActivationKind::kClampedSwiglu:
      return visit(ClampedSwiglu(activation));
  }
}

}  // namespace iser::cuda
