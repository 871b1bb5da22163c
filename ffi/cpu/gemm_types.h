// Sizes, number formats and activations over one instruction set's `Vec`. Included by gemm_kernel.h
// alone.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/core/fp8.h"
#include "ffi/cpu/gemm_isa.h"

namespace iser::cpu {
namespace {

using Reg = Vec::Reg;
constexpr int kLanes = Vec::kLanes;
constexpr int kPanelRows = Vec::kPanelVecs * kLanes;
constexpr int kRowsAtOnce = Vec::kRowStep * Vec::kMaxRowSteps;
constexpr int kPrefetchStep = 16;  // k between two requests for the next chunk's lines
static_assert(kRowsAtOnce <= kMaxRowsAtOnce && kBlockRows / 2 % Vec::kRowStep == 0);

constexpr int min_of(int a, int b) { return a < b ? a : b; }
constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

struct F32 {
  using Storage = float;
  static float widen(float value) { return value; }
  static float narrow(float value) { return value; }
  static Reg load(const float* p) { return Vec::load(p); }
  static Reg round(Reg value) { return value; }
};

struct BF16 {
  using Storage = uint16_t;
  static float widen(uint16_t value) { return float_of(uint32_t{value} << 16); }
  static uint16_t narrow(float rounded) { return static_cast<uint16_t>(bits_of(rounded) >> 16); }
  static Reg load(const uint16_t* p) { return Vec::widen_bf16(p); }
  static Reg round(Reg value) { return Vec::round_bf16(value); }
};

// Of ffi/core/fp8.h the sizes alone: its inline functions would be others' too.
struct E4M3 {
  using Storage = uint8_t;
  static float widen(uint8_t code) {
    const uint32_t magnitude = code & 0x7f, sign = uint32_t{code} << 24 & 0x80000000u;
    const float value = float_of(magnitude << 20 | sign) * 0x1p120f;  // denormals are kept
    return magnitude == 0x7f ? float_of(0x7fc00000) : value;
  }
  // The nearest e4m3, ties to even, beyond 448 to 448; NaN stays.
  static float round(float value) {
    const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
    const uint32_t kept = (magnitude + 0x7ffff + (magnitude >> 20 & 1)) & 0xfff00000;
    const float small = float_of(magnitude) + 16384.0f - 16384.0f;  // multiples of 2^-9
    uint32_t rounded = magnitude < 0x3c800000 ? bits_of(small) : kept;
    rounded = magnitude >= 0x43e00000 ? 0x43e00000 : rounded;
    rounded = magnitude > 0x7f800000 ? magnitude : rounded;
    return float_of(rounded | (bits & 0x80000000));
  }
};

// Where the scales of a plane lie: only those of E4M3 have any.
template <class Type>
const float* scales_of(const typename Type::Storage*, int, int) {
  return nullptr;
}
template <>
inline const float* scales_of<E4M3>(const uint8_t* plane, int rows, int columns) {
  const size_t values = static_cast<size_t>(rows) * columns;
  return reinterpret_cast<const float*>(plane + (values + 15) / 16 * 16);
}

// exp(a) for sums 1 + exp(a): exact enough (2 ulp) up to the overflow to infinity, and any tiny
// value below exp(-86).
inline Reg exp_term(Reg a) {
  a = Vec::min_keep_nan(Vec::set1(89.0f), Vec::max_keep_nan(Vec::set1(-86.0f), a));
  const Reg magic =
      Vec::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Reg shifted = Vec::fma(a, Vec::set1(1.44269504f), magic);
  const Reg n = Vec::sub(shifted, magic);
  Reg r = Vec::fma(n, Vec::set1(-0.693359375f), a);
  r = Vec::fma(n, Vec::set1(2.12194440e-4f), r);
  Reg p = Vec::set1(1.0f / 720);
  p = Vec::fma(p, r, Vec::set1(1.0f / 120));
  p = Vec::fma(p, r, Vec::set1(1.0f / 24));
  p = Vec::fma(p, r, Vec::set1(1.0f / 6));
  p = Vec::fma(p, r, Vec::set1(0.5f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  p = Vec::fma(p, r, Vec::set1(1.0f));
  // 2^n in two steps, since 2^128 is not a float; doubling is exact, so contraction with the sum
  // that follows changes nothing.
  return Vec::mul(Vec::mul(p, Vec::half_pow2_of_shifted(shifted)), Vec::set1(2.0f));
}

// g * sigmoid(a).
inline Reg times_sigmoid(Reg g, Reg a) {
  return Vec::div(g, Vec::add(Vec::set1(1.0f), exp_term(Vec::sub(Vec::set1(0.0f), a))));
}

// Activations, as ffi/core/activation.h defines them.
struct Silu {
  explicit Silu(const Activation&) {}
  Reg operator()(Reg g, Reg u) const { return Vec::mul(times_sigmoid(g, g), u); }
};

struct GeluTanh {
  explicit GeluTanh(const Activation&) {}
  Reg operator()(Reg g, Reg u) const {
    const Reg cube = Vec::mul(Vec::mul(Vec::mul(Vec::set1(kGeluCubic), g), g), g);
    return Vec::mul(times_sigmoid(g, Vec::mul(Vec::set1(kGeluInner), Vec::add(g, cube))), u);
  }
};

struct ClampedSwiglu {
  float limit, alpha, offset;
  explicit ClampedSwiglu(const Activation& a) : limit(a.limit), alpha(a.alpha), offset(a.offset) {}
  Reg operator()(Reg g, Reg u) const {
    const Reg most = Vec::set1(limit), least = Vec::set1(-limit);
    g = Vec::min_keep_nan(most, g);
    u = Vec::max_keep_nan(least, Vec::min_keep_nan(most, u));
    return Vec::mul(times_sigmoid(g, Vec::mul(Vec::set1(alpha), g)),
                    Vec::add(u, Vec::set1(offset)));
  }
};

}  // namespace
}  // namespace iser::cpu
