// The expert's matrix products on a CPU: down(act(gate x, up x)) for a tile of rows, with biases.
//
// Every output element is one chain of fused multiply-adds in increasing k, whatever the tile, the
// panel or the instruction set. So a row's bits depend on the row and the weights alone: not on the
// other rows, its position, the tile height, the thread count or the ISA. docs/gemm.md has the
// study behind it.
#pragma once

#include <cstddef>

#include "ffi/core/activation.h"
#include "ffi/core/bundle.h"

namespace iser::cpu {

enum class DType : int { kF32, kBF16 };

// One expert applied to `num_rows` rows, each at its own address. All sizes but the number of rows
// are at least 1.
struct ExpertTile {
  const void* const* rows;  // [num_rows] -> [hidden]
  void* const* out_rows;    // [num_rows] -> [hidden], disjoint from inputs and weights
  int num_rows;             // 0 is allowed
  const void* gate;         // [intermediate, hidden], contiguous, scales behind it
  const void* up;           // [intermediate, hidden], likewise
  const void* down;         // [hidden, intermediate], likewise
  const float* gate_bias;   // [intermediate]; null for an expert without biases, as the next two
  const float* up_bias;     // [intermediate]
  const float* down_bias;   // [hidden]
  int hidden;
  int intermediate;
  DType dtype;  // of out_rows, and of rows but where the weights have scales: then they are f32
  WeightFormat weight_format = WeightFormat::kFloat32;  // of dtype's elements, or with scales
  Activation activation = {};
};

// Bytes of scratch that a call with at most `max_rows` rows needs, on any ISA.
size_t expert_tile_scratch_bytes(int hidden, int intermediate, int max_rows, DType dtype);

// Computes the tile on the calling thread; allocates nothing. Sums are f32; biases are added to
// complete sums. h = act(g, u) (ffi/core/activation.h) is rounded to `dtype`, the result is rounded
// to `dtype` (to nearest even). silu(g) is g / (1 + exp(-g)): silu(-inf) is NaN, as g * sigmoid(g)
// is. With FP8 h is rounded to e4m3 instead, with a scale for each row's 128 columns, of which the
// last may be fewer, and weights to value * scale in f32. A NaN or infinity in a row
// reaches that row alone; each NaN of the result is the quiet NaN 0x7fc00000 (bf16 0x7fc0).
// Denormals are kept, whatever the thread's floating-point mode. `scratch` is 64-byte aligned and
// may hold anything.
void expert_tile(const ExpertTile& tile, std::byte* scratch);

// The tile height to split long runs of rows into; any other height gives the same bits.
int preferred_tile_rows(int hidden, int intermediate, DType dtype);

// C[m, n] = sum_k X[m, k] W[n, k] in f32, all row-major and contiguous: the same kernel without the
// expert around it.
size_t gemm_tn_scratch_bytes(int m, int k);
void gemm_tn(int m, int n, int k, const float* x, const float* w, float* c, std::byte* scratch);

// The instruction set in use: "avx512", "avx2", "neon" or "portable". The best one of this CPU
// unless the environment's ISER_CPU_ISA, read once, names another; throws std::invalid_argument if
// that is unknown or not available here.
const char* gemm_isa();

// Uses `isa` from now on (nullptr: the best one). Returns false, and changes nothing, if it is
// unknown or not available here. Not to be called while a tile is computed.
bool set_gemm_isa(const char* isa);

}  // namespace iser::cpu
