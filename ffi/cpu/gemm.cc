// Chooses the instruction set, and keeps the thread's floating-point mode from changing any bit.
#include "ffi/cpu/gemm.h"

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "ffi/cpu/gemm_isa.h"

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#endif

namespace iser::cpu {
namespace {

// Round to nearest and keep denormals while a tile is computed: XLA's own threads flush them.
class DefaultFloatMode {
 public:
#if defined(__x86_64__) || defined(_M_X64)
  DefaultFloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }  // all exceptions masked
  ~DefaultFloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~DefaultFloatMode() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  DefaultFloatMode() {}
#endif
};

bool has_avx2() {
#if defined(__x86_64__) || defined(_M_X64)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

bool has_avx512() {
#if defined(__x86_64__) || defined(_M_X64)
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

// What this CPU can run, best first, then null.
struct Available {
  const IsaKernels* kernels[5] = {};
  Available() {
    int n = 0;
    if (kAvx512Kernels && has_avx512()) kernels[n++] = kAvx512Kernels;
    if (kAvx2Kernels && has_avx2()) kernels[n++] = kAvx2Kernels;
    if (kNeonKernels) kernels[n++] = kNeonKernels;
    kernels[n++] = kPortableKernels;
  }
};

const IsaKernels* find(const char* name) {
  static const Available available;
  if (!name) return available.kernels[0];
  for (const IsaKernels* kernels : available.kernels)
    if (kernels && !std::strcmp(kernels->name, name)) return kernels;
  return nullptr;
}

const IsaKernels* from_environment() {
  const char* name = std::getenv("ISER_CPU_ISA");
  if (name && !*name) name = nullptr;
  if (const IsaKernels* kernels = find(name)) return kernels;
  throw std::invalid_argument("ISER_CPU_ISA=" + std::string(name) +
                              " is not available on this CPU; its choices are avx512, avx2, neon, "
                              "portable, and the best one here is " +
                              find(nullptr)->name + ": unset it or use that");
}

std::atomic<const IsaKernels*>& chosen() {
  static std::atomic<const IsaKernels*> kernels{from_environment()};
  return kernels;
}

}  // namespace

size_t expert_tile_scratch_bytes(int hidden, int intermediate, int max_rows, DType) {
  return sizeof(float) * ScratchLayout(max_rows, hidden, intermediate).end;
}

size_t gemm_tn_scratch_bytes(int m, int k) {
  return sizeof(float) * ScratchLayout(m < kGemmRows ? m : kGemmRows, k, 0).end;
}

void expert_tile(const ExpertTile& tile, std::byte* scratch) {
  if (tile.num_rows == 0) return;
  const DefaultFloatMode mode;
  chosen().load(std::memory_order_relaxed)->expert_tile(tile, scratch);
}

void gemm_tn(int m, int n, int k, const float* x, const float* w, float* c, std::byte* scratch) {
  const DefaultFloatMode mode;
  chosen().load(std::memory_order_relaxed)->gemm_tn(m, n, k, x, w, c, scratch);
}

int preferred_tile_rows(int, int, DType) { return 96; }

const char* gemm_isa() { return chosen().load(std::memory_order_relaxed)->name; }

bool set_gemm_isa(const char* isa) {
  const IsaKernels* kernels = find(isa);
  if (kernels) chosen().store(kernels, std::memory_order_relaxed);
  return kernels != nullptr;
}

}  // namespace iser::cpu
