// What stands between an expert's first two products and its third: h = act(gate, up).
//
// One rule for every engine, platform and reference:
//
//   silu            gate * sigmoid(gate) * up
//   gelu_tanh       gate * sigmoid(2 * sqrt(2 / pi) * (gate + 0.044715 * gate^3)) * up
//   clamped_swiglu  g * sigmoid(alpha * g) * (u + offset), where g = min(gate, limit) and
//                   u = max(-limit, min(up, limit)); gpt-oss has limit 7, alpha 1.702, offset 1
//
// A NaN in gate or up stays a NaN.
#pragma once

#include <cmath>
#include <cstdint>

#include "ffi/core/expert.h"

namespace iser {

// In the order of jax_iser/experts/activation.py.
enum class ActivationKind : int32_t { kSilu = 0, kGeluTanh = 1, kClampedSwiglu = 2 };
constexpr int32_t kNumActivationKinds = 3;

// The parameters are those of clamped_swiglu; the other kinds ignore them.
struct Activation {
  ActivationKind kind = ActivationKind::kSilu;
  float limit = 0.0f;  // above 0
  float alpha = 1.0f;
  float offset = 0.0f;
};

constexpr float kGeluInner = 1.5957691216f;  // 2 * sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

// The value as the rule above says it, by expf: the engines have faster exponentials of their own.
ISER_HD inline float apply_activation(const Activation& activation, float gate, float up) {
  switch (activation.kind) {
    case ActivationKind::kGeluTanh: {
      const float inner = kGeluInner * (gate + kGeluCubic * gate * gate * gate);
      return gate / (1.0f + expf(-inner)) * up;
    }
    case ActivationKind::kClampedSwiglu: {
      const float g = gate > activation.limit ? activation.limit : gate;
      const float above = up > activation.limit ? activation.limit : up;
      const float u = above < -activation.limit ? -activation.limit : above;
      return g / (1.0f + expf(-activation.alpha * g)) * (u + activation.offset);
    }
    case ActivationKind::kSilu:
      break;
  }
  return gate / (1.0f + expf(-gate)) * up;
}

}  // namespace iser
