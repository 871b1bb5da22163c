// The tile algorithm, once for all instruction sets. Included by each gemm_<isa>.cc after it has defined `Vec` in an unnamed
// namespace. Everything here has internal linkage and uses no inline function of the standard library: one emitted with AVX-512
// could otherwise be the copy that the linker keeps for the whole program.
//
// A tile's rows lie along the vector lanes. They are packed once as panels x^T[k][width], `width` being kPanelVecs vectors or, in
// the last panel, fewer. Blocks of weight rows are copied (bf16: widened) to scratch and broadcast against the panels. The sums of
// gate and up come out in panel order, so that h needs no packing for the second product.
#pragma once

#include <cstdint>
#include <cstring>

#include "ffi/cpu/gemm_isa.h"

namespace iser::cpu {
namespace {

using Reg = Vec::Reg;
constexpr int kLanes = Vec::kLanes;
constexpr int kPanelRows = Vec::kPanelVecs * kLanes;

constexpr int min_of(int a, int b) { return a < b ? a : b; }

// A tile's rows cut into panels; panel p of a matrix with `depth` values a row starts at p * kPanelRows * depth.
struct Panels {
  int num_rows;
  int count() const { return (num_rows + kPanelRows - 1) / kPanelRows; }
  int rows(int p) const { return min_of(kPanelRows, num_rows - p * kPanelRows); }
  int vecs(int p) const { return (rows(p) + kLanes - 1) / kLanes; }
};

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

// exp(a) for sums 1 + exp(a): exact enough (2 ulp) up to the overflow to infinity, and any tiny value below exp(-86).
inline Reg exp_term(Reg a) {
  a = Vec::min_keep_nan(Vec::set1(89.0f), Vec::max_keep_nan(Vec::set1(-86.0f), a));
  const Reg magic = Vec::set1(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
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
  // 2^n in two steps, since 2^128 is not a float; doubling is exact, so contraction with the sum that follows changes nothing.
  return Vec::mul(Vec::mul(p, Vec::half_pow2_of_shifted(shifted)), Vec::set1(2.0f));
}

inline Reg silu(Reg g) {
  return Vec::div(g, Vec::add(Vec::set1(1.0f), exp_term(Vec::sub(Vec::set1(0.0f), g))));
}

// sums[m][:] (+)= sum over k of w[m][k] * x[k][:], one fma chain an element.
template <int kRows, int kVecs>
inline void multiply(const float* w, const float* x, int depth, bool is_first, float* sums) {
  Reg acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      acc[m][v] = is_first ? Vec::set1(0.0f) : Vec::load(sums + (m * kVecs + v) * kLanes);
  for (int k = 0; k < depth; ++k, x += kVecs * kLanes) {
    Reg xs[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) xs[v] = Vec::load(x + v * kLanes);
#pragma GCC unroll 16
    for (int m = 0; m < kRows; ++m) {
      const Reg weight = Vec::set1(w[m * kWeightStride + k]);
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) acc[m][v] = Vec::fma(weight, xs[v], acc[m][v]);
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) Vec::store(sums + (m * kVecs + v) * kLanes, acc[m][v]);
}

// All of a block's weight rows (a multiple of kRowStep) against one panel.
template <int kVecs>
void multiply_panel(const float* w, const float* x, int num_rows, int depth, bool is_first, float* sums) {
  constexpr int kFull = Vec::kRowStep * Vec::kMaxRowSteps;
  int m = 0;
  for (; m + kFull <= num_rows; m += kFull)
    multiply<kFull, kVecs>(w + m * kWeightStride, x, depth, is_first, sums + m * kVecs * kLanes);
  for (; m < num_rows; m += Vec::kRowStep)
    multiply<Vec::kRowStep, kVecs>(w + m * kWeightStride, x, depth, is_first, sums + m * kVecs * kLanes);
}

inline void multiply_panel(int vecs, const float* w, const float* x, int num_rows, int depth, bool is_first, float* sums) {
  static_assert(Vec::kPanelVecs <= 3, "one case a width");
  if (vecs == 1) return multiply_panel<1>(w, x, num_rows, depth, is_first, sums);
  if (vecs == 2) return multiply_panel<2>(w, x, num_rows, depth, is_first, sums);
  if constexpr (Vec::kPanelVecs >= 3) multiply_panel<3>(w, x, num_rows, depth, is_first, sums);
}

// dst[m][0:depth] = src[m][0:depth] in f32; rows past num_rows are zero.
template <class Type>
void copy_weights(const typename Type::Storage* src, int stride, int num_rows, int padded_rows, int depth, float* dst) {
  for (int m = 0; m < padded_rows; ++m, dst += kWeightStride) {
    if (m >= num_rows) {
      memset(dst, 0, sizeof(float) * depth);
      continue;
    }
    const auto* row = src + static_cast<size_t>(m) * stride;
    int k = 0;
    for (; k + kLanes <= depth; k += kLanes) Vec::store(dst + k, Type::load(row + k));
    for (; k < depth; ++k) dst[k] = Type::widen(row[k]);
  }
}

// panels[p][k][lane] = rows[p * kPanelRows + lane][k]; lanes without a row are zero.
template <class Type>
void pack_rows(const void* const* rows, Panels panels, int depth, float* packed) {
  constexpr int kStep = 32;  // k at a time, so that the lines being filled stay in L1
  for (int p = 0; p < panels.count(); ++p) {
    const int width = panels.vecs(p) * kLanes;
    float* panel = packed + static_cast<size_t>(p) * kPanelRows * depth;
    for (int k0 = 0; k0 < depth; k0 += kStep) {
      const int k1 = min_of(depth, k0 + kStep);
      for (int lane = 0; lane < width; ++lane) {
        const bool has_row = lane < panels.rows(p);
        const auto* row = has_row ? static_cast<const typename Type::Storage*>(rows[p * kPanelRows + lane]) : nullptr;
        for (int k = k0; k < k1; ++k) panel[static_cast<size_t>(k) * width + lane] = has_row ? Type::widen(row[k]) : 0.0f;
      }
    }
  }
}

// One plane's rows [first_row, first_row + num_rows) of a block.
struct WeightRows {
  const void* plane;
  int first_row;
  int num_rows;
  int padded_rows() const { return (num_rows + Vec::kRowStep - 1) / Vec::kRowStep * Vec::kRowStep; }
};

// sums[p][m][lane] = sum over k of weights[m][k] * x[p][k][lane] for the rows of up to two planes, one after the other.
template <class Type>
void multiply_block(const WeightRows* parts, int num_parts, int depth, Panels panels, const float* x, float* weights, float* sums) {
  int block_rows = 0;
  for (int i = 0; i < num_parts; ++i) block_rows += parts[i].padded_rows();
  for (int k0 = 0; k0 < depth; k0 += kBlockDepth) {
    const int block_depth = min_of(kBlockDepth, depth - k0);
    float* dst = weights;
    for (int i = 0; i < num_parts; ++i) {
      const auto* plane = static_cast<const typename Type::Storage*>(parts[i].plane);
      const auto* src = plane + static_cast<size_t>(parts[i].first_row) * depth + k0;
      copy_weights<Type>(src, depth, parts[i].num_rows, parts[i].padded_rows(), block_depth, dst);
      dst += parts[i].padded_rows() * kWeightStride;
    }
    for (int p = 0; p < panels.count(); ++p) {
      const int width = panels.vecs(p) * kLanes;
      const float* x_panel = x + static_cast<size_t>(p) * kPanelRows * depth + static_cast<size_t>(k0) * width;
      float* sums_panel = sums + p * kPanelRows * kBlockRows;
      multiply_panel(panels.vecs(p), weights, x_panel, block_rows, block_depth, k0 == 0, sums_panel);
    }
  }
}

// h panels = round(silu(gate x) * up x) from x panels.
template <class Type>
void gate_up(const void* gate, const void* up, int hidden, int intermediate, Panels panels, const float* x, float* weights,
             float* sums, float* h) {
  constexpr int kHalf = kBlockRows / 2;
  for (int i0 = 0; i0 < intermediate; i0 += kHalf) {
    const int num_rows = min_of(kHalf, intermediate - i0);
    const WeightRows parts[2] = {{gate, i0, num_rows}, {up, i0, num_rows}};
    multiply_block<Type>(parts, 2, hidden, panels, x, weights, sums);
    for (int p = 0; p < panels.count(); ++p) {
      const int width = panels.vecs(p) * kLanes;
      const float* g = sums + p * kPanelRows * kBlockRows;
      const float* u = g + parts[0].padded_rows() * width;
      float* dst = h + static_cast<size_t>(p) * kPanelRows * intermediate + static_cast<size_t>(i0) * width;
      for (int j = 0; j < num_rows * width; j += kLanes)
        Vec::store(dst + j, Type::round(Vec::mul(silu(Vec::load(g + j)), Vec::load(u + j))));
    }
  }
}

// out_rows[row][first + m] = round(sums[m][row]) for one panel; the rounding is done in place first, a vector at a time.
template <class Type>
void store_panel(float* sums, int width, int num_cols, int num_rows, void* const* out_rows, int first) {
  for (int j = 0; j < num_cols * width; j += kLanes)
    Vec::store(sums + j, Type::round(Vec::quiet_nan(Vec::load(sums + j))));
  for (int row = 0; row < num_rows; ++row) {
    auto* out = static_cast<typename Type::Storage*>(out_rows[row]) + first;
    for (int m = 0; m < num_cols; ++m) out[m] = Type::narrow(sums[m * width + row]);
  }
}

// out_rows = x W^T for packed x.
template <class Type>
void project(const void* plane, int depth, int num_cols, Panels panels, const float* x, float* weights, float* sums,
             void* const* out_rows) {
  for (int n0 = 0; n0 < num_cols; n0 += kBlockRows) {
    const WeightRows part = {plane, n0, min_of(kBlockRows, num_cols - n0)};
    multiply_block<Type>(&part, 1, depth, panels, x, weights, sums);
    for (int p = 0; p < panels.count(); ++p)
      store_panel<Type>(sums + p * kPanelRows * kBlockRows, panels.vecs(p) * kLanes, part.num_rows, panels.rows(p),
                        out_rows + p * kPanelRows, n0);
  }
}

template <class Type>
void expert_tile_of(const ExpertTile& tile, float* scratch) {
  const Panels panels{tile.num_rows};
  const ScratchLayout at(tile.num_rows, tile.hidden, tile.intermediate);
  pack_rows<Type>(tile.rows, panels, tile.hidden, scratch + at.x);
  gate_up<Type>(tile.gate, tile.up, tile.hidden, tile.intermediate, panels, scratch + at.x, scratch + at.weights,
                scratch + at.sums, scratch + at.h);
  project<Type>(tile.down, tile.intermediate, tile.hidden, panels, scratch + at.h, scratch + at.weights, scratch + at.sums,
                tile.out_rows);
}

void expert_tile_isa(const ExpertTile& tile, std::byte* scratch) {
  auto* floats = reinterpret_cast<float*>(scratch);
  tile.dtype == DType::kBF16 ? expert_tile_of<BF16>(tile, floats) : expert_tile_of<F32>(tile, floats);
}

// Row addresses are made a panel's worth of them at a time, on the stack.
void gemm_tn_isa(int m, int n, int k, const float* x, const float* w, float* c, std::byte* scratch) {
  constexpr int kChunk = kPanelRows * 8;
  const void* rows[kChunk];
  void* out_rows[kChunk];
  auto* floats = reinterpret_cast<float*>(scratch);
  for (int first = 0; first < m; first += kChunk) {
    const Panels panels{min_of(kChunk, m - first)};
    for (int i = 0; i < panels.num_rows; ++i) {
      rows[i] = x + static_cast<size_t>(first + i) * k;
      out_rows[i] = c + static_cast<size_t>(first + i) * n;
    }
    const ScratchLayout at(panels.num_rows, k, 0);
    pack_rows<F32>(rows, panels, k, floats + at.x);
    project<F32>(w, k, n, panels, floats + at.x, floats + at.weights, floats + at.sums, out_rows);
  }
}

}  // namespace
}  // namespace iser::cpu
