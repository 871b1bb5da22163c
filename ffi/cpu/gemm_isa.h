// What each instruction set provides, and the sizes all of them share. Private to gemm*.cc.
#pragma once

#include "ffi/cpu/gemm.h"

namespace iser::cpu {

struct IsaKernels {
  const char* name;
  void (*expert_tile)(const ExpertTile& tile, std::byte* scratch);
  void (*gemm_tn)(int m, int n, int k, const float* x, const float* w, float* c,
                  std::byte* scratch);
};

// Null where the compiler's target has no such instructions.
extern const IsaKernels* const kAvx512Kernels;
extern const IsaKernels* const kAvx2Kernels;
extern const IsaKernels* const kNeonKernels;
extern const IsaKernels* const kPortableKernels;

constexpr int kBlockRows = 96;      // weight rows whose sums are kept at a time: T x 96 stay in L2
constexpr int kBlockDepth = 512;    // k of a chunk of weights
constexpr int kMaxRowsAtOnce = 12;  // weight rows of a chunk
// Floats between a chunk's rows: not a power of two, so that they do not share cache sets.
constexpr int kWeightStride = kBlockDepth + 16;
constexpr int kMaxLanes = 16;  // rows of a tile are padded to the vector width, at most this

constexpr int kGemmRows =
    192;  // rows that gemm_tn takes at a time: a multiple of every panel's rows

constexpr size_t round_up(size_t n, size_t step) { return (n + step - 1) / step * step; }

// Scratch of one call, in floats, each part a multiple of 64 bytes.
struct ScratchLayout {
  size_t x, h, sums, weights, end;
  constexpr ScratchLayout(size_t rows, size_t depth, size_t hidden_depth)
      : x(0),
        h(x + round_up(rows, kMaxLanes) * depth),
        sums(h + round_up(rows, kMaxLanes) * hidden_depth),
        weights(sums + round_up(rows, kMaxLanes) * kBlockRows),
        end(weights + size_t{kMaxRowsAtOnce} * kWeightStride) {}
};

}  // namespace iser::cpu
