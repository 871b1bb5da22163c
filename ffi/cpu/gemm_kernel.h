// The tile algorithm, once for all instruction sets. Included by each gemm_<isa>.cc after it has
// defined `Vec` in an unnamed namespace. Everything here has internal linkage and uses no inline
// function of the standard library: one emitted with AVX-512 could otherwise be the copy that the
// linker keeps for the whole program.
//
// A tile's rows lie along the vector lanes. They are packed once as panels x^T[k][width], `width`
// being kPanelVecs vectors or, in the last panel, fewer. Chunks of weights are copied to scratch,
// so that they are contiguous f32 whatever their stride and type, and broadcast against the panels.
// The sums of gate and up come out in panel order, so that h needs no packing for the second
// product.
#pragma once

#include "ffi/cpu/gemm_types.h"
#include "ffi/cpu/gemm_weights.h"

namespace iser::cpu {
namespace {

// A tile's rows cut into panels.
struct Panels {
  int num_rows;
  int count() const { return ceil_div(num_rows, kPanelRows); }
  int rows(int p) const { return min_of(kPanelRows, num_rows - p * kPanelRows); }
  // Where panel p starts in a matrix with `depth` values a row.
  size_t start(int p, int depth) const { return static_cast<size_t>(p) * kPanelRows * depth; }
  int vecs(int p) const { return ceil_div(rows(p), kLanes); }
};

// panels[p][k][lane] = rows[p * kPanelRows + lane][k]; lanes without a row are zero.
template <class Type>
void pack_rows(const void* const* rows, Panels panels, int depth, float* packed) {
  constexpr int kStep = 32;  // k at a time, so that the lines being filled stay in L1
  for (int p = 0; p < panels.count(); ++p) {
    const int width = panels.vecs(p) * kLanes;
    float* panel = packed + panels.start(p, depth);
    for (int k0 = 0; k0 < depth; k0 += kStep) {
      const int k1 = min_of(depth, k0 + kStep);
      for (int lane = 0; lane < width; ++lane) {
        const bool has_row = lane < panels.rows(p);
        const auto* row =
            has_row ? static_cast<const typename Type::Storage*>(rows[p * kPanelRows + lane])
                    : nullptr;
        for (int k = k0; k < k1; ++k)
          panel[static_cast<size_t>(k) * width + lane] = has_row ? Type::widen(row[k]) : 0.0f;
      }
    }
  }
}

// sums[m][:] (+)= sum over k of w[m][k] * x[k][:], one fma chain an element.
template <int kRows, int kVecs>
void multiply(const float* w, const float* x, int depth, bool is_first, float* sums,
              Prefetcher& prefetcher) {
  Reg acc[kRows][kVecs];
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v)
      acc[m][v] = is_first ? Vec::set1(0.0f) : Vec::load(sums + (m * kVecs + v) * kLanes);
  for (int k0 = 0; k0 < depth; k0 += kPrefetchStep) {
    prefetcher.step();
    const int k1 = min_of(depth, k0 + kPrefetchStep);
    for (int k = k0; k < k1; ++k, x += kVecs * kLanes) {
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
  }
#pragma GCC unroll 16
  for (int m = 0; m < kRows; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) Vec::store(sums + (m * kVecs + v) * kLanes, acc[m][v]);
}

// A chunk's copied rows (a multiple of kRowStep) against one panel.
template <int kVecs>
void multiply_panel(const float* w, const float* x, int num_rows, int depth, bool is_first,
                    float* sums, Prefetcher& prefetcher) {
  if (num_rows == kRowsAtOnce)
    return multiply<kRowsAtOnce, kVecs>(w, x, depth, is_first, sums, prefetcher);
  for (int m = 0; m < num_rows; m += Vec::kRowStep)
    multiply<Vec::kRowStep, kVecs>(w + m * kWeightStride, x, depth, is_first,
                                   sums + m * kVecs * kLanes, prefetcher);
}

using MultiplyPanel = void (*)(const float*, const float*, int, int, bool, float*, Prefetcher&);

inline MultiplyPanel multiply_panel_of(int vecs) {
  static_assert(Vec::kPanelVecs == 2 || Vec::kPanelVecs == 3, "one case a width");
  if (vecs == 1) return multiply_panel<1>;
  if (vecs == 2) return multiply_panel<2>;
  return multiply_panel<Vec::kPanelVecs>;
}

// sums[p][row][lane] = sum over k of weight[row][k] * x[p][k][lane] for the rows of the block's
// planes. Each chunk is copied once and meets all panels; the panels stream by from L2.
template <class Type>
void multiply_block(const WeightBlock<Type>& block, Panels panels, const float* x, float* weights,
                    float* sums) {
  const WeightBlock<Type> next_block = block.next();
  const int num_chunks = block.num_chunks();
  for (int i = 0; i < num_chunks; ++i) {
    const Chunk<Type> chunk = block.chunk(i);
    copy_weights(chunk, weights);
    const Chunk<Type> next = i + 1 < num_chunks      ? block.chunk(i + 1)
                             : next_block.is_empty() ? Chunk<Type>{}
                                                     : next_block.chunk(0);
    Prefetcher prefetcher(next, panels.count() * ceil_div(chunk.depth, kPrefetchStep));
    const int first_sum = block.plane(i) * block.padded_rows() + block.row(i);
    for (int p = 0; p < panels.count(); ++p) {
      const int width = panels.vecs(p) * kLanes;
      const float* panel =
          x + panels.start(p, block.depth) + static_cast<size_t>(block.k(i)) * width;
      multiply_panel_of(panels.vecs(p))(
          weights, panel, chunk.padded_rows(), chunk.depth, block.k(i) == 0,
          sums + panels.start(p, kBlockRows) + first_sum * width, prefetcher);
    }
  }
}

// dst = round(act(g, u)) for rows of sums of `width`; biases, null for none, are those of the rows.
template <class Hidden, class Act>
void activate(Act act, const float* g, const float* u, const float* gate_bias, const float* up_bias,
              int num_rows, int width, float* dst) {
  for (int row = 0; row < num_rows; ++row, g += width, u += width, dst += width) {
    const Reg of_gate = Vec::set1(gate_bias ? gate_bias[row] : 0.0f);
    const Reg of_up = Vec::set1(up_bias ? up_bias[row] : 0.0f);
    for (int j = 0; j < width; j += kLanes) {
      Reg gated = Vec::load(g + j), linear = Vec::load(u + j);
      if (gate_bias) gated = Vec::add(gated, of_gate), linear = Vec::add(linear, of_up);
      Vec::store(dst + j, Hidden::round(act(gated, linear)));
    }
  }
}

// h panels = round(act(gate x, up x)) from x panels, rounded to Hidden.
template <class Type, class Hidden, class Act>
void gate_up(const ExpertTile& tile, Panels panels, const float* x, float* weights, float* sums,
             float* h) {
  const Act act(tile.activation);
  using Plane = const typename Type::Storage*;
  WeightBlock<Type> block{{static_cast<Plane>(tile.gate), static_cast<Plane>(tile.up)},
                          2,
                          tile.intermediate,
                          tile.hidden,
                          0};
  for (; !block.is_empty(); block = block.next()) {
    multiply_block(block, panels, x, weights, sums);
    for (int p = 0; p < panels.count(); ++p) {
      const int width = panels.vecs(p) * kLanes;
      const float* g = sums + panels.start(p, kBlockRows);
      const float* u = g + block.padded_rows() * width;
      float* dst =
          h + panels.start(p, tile.intermediate) + static_cast<size_t>(block.first_row) * width;
      const int first = block.first_row;
      activate<Hidden>(act, g, u, tile.gate_bias ? tile.gate_bias + first : nullptr,
                       tile.up_bias ? tile.up_bias + first : nullptr, block.num_rows(), width, dst);
    }
  }
}

template <class Type, class Hidden>
void gate_up_of(const ExpertTile& tile, Panels panels, const float* x, float* weights, float* sums,
                float* h) {
  switch (tile.activation.kind) {
    case ActivationKind::kSilu:
      return gate_up<Type, Hidden, Silu>(tile, panels, x, weights, sums, h);
    case ActivationKind::kGeluTanh:
      return gate_up<Type, Hidden, GeluTanh>(tile, panels, x, weights, sums, h);
    case ActivationKind::kClampedSwiglu:
      return gate_up<Type, Hidden, ClampedSwiglu>(tile, panels, x, weights, sums, h);
  }
}

// h rounded to e4m3 with a scale for each row's 128 values: what the product in FP8 would take.
inline void round_hidden(Panels panels, int depth, float* h) {
  for (int p = 0; p < panels.count(); ++p) {
    const int width = panels.vecs(p) * kLanes;
    float* block = h + panels.start(p, depth);
    for (int k0 = 0; k0 < depth; k0 += fp8::kBlock, block += fp8::kBlock * width) {
      const int columns = min_of(fp8::kBlock, depth - k0);
      float amax[kPanelRows] = {}, up[kPanelRows], down[kPanelRows];
      for (int k = 0; k < columns; ++k) {
        for (int lane = 0; lane < width; ++lane) {
          const float magnitude = float_of(bits_of(block[k * width + lane]) & 0x7fffffff);
          amax[lane] = magnitude > amax[lane] ? magnitude : amax[lane];  // a NaN has none
        }
      }
      for (int lane = 0; lane < width; ++lane) {
        const float most = amax[lane] > fp8::kMinAmax ? amax[lane] : fp8::kMinAmax;
        up[lane] = fp8::kMax / most, down[lane] = most / fp8::kMax;
      }
      for (int k = 0; k < columns; ++k) {
        for (int lane = 0; lane < width; ++lane) {
          float& value = block[k * width + lane];
          value = E4M3::round(value * up[lane]) * down[lane];
        }
      }
    }
  }
}

// out_rows[row][first + m] = round(sums[m][row] + bias[first + m]) for one panel, `bias` null for
// none; sum and rounding are done in place first, a vector at a time.
template <class Type>
void store_panel(float* sums, int width, int num_cols, int num_rows, void* const* out_rows,
                 int first, const float* bias) {
  for (int m = 0; bias && m < num_cols; ++m) {
    const Reg of_column = Vec::set1(bias[first + m]);
    for (float* at = sums + m * width; at < sums + (m + 1) * width; at += kLanes)
      Vec::store(at, Vec::add(Vec::load(at), of_column));
  }
  for (int j = 0; j < num_cols * width; j += kLanes)
    Vec::store(sums + j, Type::round(Vec::quiet_nan(Vec::load(sums + j))));
  for (int row = 0; row < num_rows; ++row) {
    auto* out = static_cast<typename Type::Storage*>(out_rows[row]) + first;
    for (int m = 0; m < num_cols; ++m) out[m] = Type::narrow(sums[m * width + row]);
  }
}

// out_rows = x W^T + bias for packed x, rounded to Out.
template <class Type, class Out>
void project(const void* plane, const float* bias, int depth, int num_cols, Panels panels,
             const float* x, float* weights, float* sums, void* const* out_rows) {
  WeightBlock<Type> block{
      {static_cast<const typename Type::Storage*>(plane), nullptr}, 1, num_cols, depth, 0};
  for (; !block.is_empty(); block = block.next()) {
    multiply_block(block, panels, x, weights, sums);
    for (int p = 0; p < panels.count(); ++p)
      store_panel<Out>(sums + panels.start(p, kBlockRows), panels.vecs(p) * kLanes,
                       block.num_rows(), panels.rows(p), out_rows + p * kPanelRows, block.first_row,
                       bias);
  }
}

// A weight format: what rows, which h is rounded to as well, and weights are made of.
struct Float32Weights {
  using Rows = F32;
  using Weights = F32;
  static void finish_hidden(Panels, int, float*) {}
};

struct BFloat16Weights {
  using Rows = BF16;
  using Weights = BF16;
  static void finish_hidden(Panels, int, float*) {}
};

struct Float8Block128Weights {
  using Rows = F32;
  using Weights = E4M3;
  static void finish_hidden(Panels panels, int depth, float* h) { round_hidden(panels, depth, h); }
};

template <class Format, class Out>
void expert_tile_of(const ExpertTile& tile, float* scratch) {
  using Rows = typename Format::Rows;
  using Weights = typename Format::Weights;
  const Panels panels{tile.num_rows};
  const ScratchLayout at(tile.num_rows, tile.hidden, tile.intermediate);
  pack_rows<Rows>(tile.rows, panels, tile.hidden, scratch + at.x);
  gate_up_of<Weights, Rows>(tile, panels, scratch + at.x, scratch + at.weights, scratch + at.sums,
                            scratch + at.h);
  Format::finish_hidden(panels, tile.intermediate, scratch + at.h);
  project<Weights, Out>(tile.down, tile.down_bias, tile.intermediate, tile.hidden, panels,
                        scratch + at.h, scratch + at.weights, scratch + at.sums, tile.out_rows);
}

void expert_tile_isa(const ExpertTile& tile, std::byte* scratch) {
  auto* floats = reinterpret_cast<float*>(scratch);
  switch (tile.weight_format) {
    case WeightFormat::kFloat32:
      return expert_tile_of<Float32Weights, F32>(tile, floats);
    case WeightFormat::kBFloat16:
      return expert_tile_of<BFloat16Weights, BF16>(tile, floats);
    case WeightFormat::kFloat8Block128:
      return tile.dtype == DType::kBF16 ? expert_tile_of<Float8Block128Weights, BF16>(tile, floats)
                                        : expert_tile_of<Float8Block128Weights, F32>(tile, floats);
  }
}

// kGemmRows rows at a time, so that their addresses fit on the stack.
void gemm_tn_isa(int m, int n, int k, const float* x, const float* w, float* c,
                 std::byte* scratch) {
  static_assert(kGemmRows % kPanelRows == 0);
  const void* rows[kGemmRows];
  void* out_rows[kGemmRows];
  auto* floats = reinterpret_cast<float*>(scratch);
  for (int first = 0; first < m; first += kGemmRows) {
    const Panels panels{min_of(kGemmRows, m - first)};
    for (int i = 0; i < panels.num_rows; ++i) {
      rows[i] = x + static_cast<size_t>(first + i) * k;
      out_rows[i] = c + static_cast<size_t>(first + i) * n;
    }
    const ScratchLayout at(panels.num_rows, k, 0);
    pack_rows<F32>(rows, panels, k, floats + at.x);
    project<F32, F32>(w, nullptr, k, n, panels, floats + at.x, floats + at.weights,
                      floats + at.sums, out_rows);
  }
}

}  // namespace
}  // namespace iser::cpu
