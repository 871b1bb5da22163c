// The kernel of ffi/cpu/gemm.h behind the C interface that bench_gemm.py loads.
#include <cstdlib>
#include <new>

#include "ffi/cpu/gemm.h"

namespace {

// 64-byte aligned, grown when needed, one a thread.
std::byte* scratch_of(size_t bytes) {
  struct Scratch {
    std::byte* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
  };
  static thread_local Scratch scratch;
  if (bytes > scratch.size) {
    std::free(scratch.data);
    scratch.size = (bytes + 63) / 64 * 64;
    scratch.data = static_cast<std::byte*>(std::aligned_alloc(64, scratch.size));
    if (!scratch.data) throw std::bad_alloc();
  }
  return scratch.data;
}

}  // namespace

extern "C" const char* version() { return iser::cpu::gemm_isa(); }

extern "C" void gemm(int m, int n, int k, const float* x, const float* w, float* c) {
  iser::cpu::gemm_tn(m, n, k, x, w, c, scratch_of(iser::cpu::gemm_tn_scratch_bytes(m, k)));
}

// x and y are arrays of row addresses; dtype is iser::cpu::DType.
extern "C" void expert(int num_rows, int hidden, int intermediate, int dtype, const void* const* x,
                       const void* gate, const void* up, const void* down, void* const* y) {
  using iser::cpu::DType;
  const auto type = static_cast<DType>(dtype);
  iser::cpu::ExpertTile tile{};
  tile.rows = x;
  tile.out_rows = y;
  tile.num_rows = num_rows;
  tile.gate = gate, tile.up = up, tile.down = down;
  tile.hidden = hidden;
  tile.intermediate = intermediate;
  tile.dtype = type;
  tile.weight_format =
      type == DType::kF32 ? iser::WeightFormat::kFloat32 : iser::WeightFormat::kBFloat16;
  iser::cpu::expert_tile(
      tile, scratch_of(iser::cpu::expert_tile_scratch_bytes(hidden, intermediate, num_rows, type)));
}

extern "C" int preferred_rows(int hidden, int intermediate, int dtype) {
  return iser::cpu::preferred_tile_rows(hidden, intermediate, static_cast<iser::cpu::DType>(dtype));
}
