// expert_tile with AVX2 and FMA: 6 weight rows x 16 tile rows a step. Compiled with -mavx2 -mfma.
#include "ffi/cpu/gemm_isa.h"

#if defined(__x86_64__) || defined(_M_X64)
#if !defined(__AVX2__) || !defined(__FMA__)
#error "gemm_avx2.cc needs -mavx2 -mfma (this file alone)"
#endif
#include <immintrin.h>

#include <cstdint>

namespace iser::cpu {
namespace {

struct Vec {
  using Reg = __m256;
  static constexpr int kLanes = 8, kPanelVecs = 2, kRowStep = 2, kMaxRowSteps = 3;
  static Reg load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Reg a) { _mm256_storeu_ps(p, a); }
  static Reg set1(float a) { return _mm256_set1_ps(a); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm256_fmadd_ps(a, b, c); }
  static Reg add(Reg a, Reg b) { return _mm256_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm256_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm256_mul_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm256_div_ps(a, b); }
  static Reg min_keep_nan(Reg limit, Reg a) {
    return _mm256_min_ps(limit, a);
  }  // the second operand if either is NaN
  static Reg max_keep_nan(Reg limit, Reg a) { return _mm256_max_ps(limit, a); }
  static Reg half_pow2_of_shifted(Reg shifted) {
    const __m256i n =
        _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(0x4b400000 - 126));
    return _mm256_castsi256_ps(_mm256_slli_epi32(n, 23));
  }
  static Reg quiet_nan(Reg a) {
    const Reg nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(a, nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
  static Reg widen_bf16(const uint16_t* p) {
    const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
  }
  static Reg round_bf16(Reg a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i kept = _mm256_and_si256(sum, _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
    const Reg nan = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fc00000));
    return _mm256_blendv_ps(_mm256_castsi256_ps(kept), nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  }
};

}  // namespace
}  // namespace iser::cpu

#include "ffi/cpu/gemm_kernel.h"

namespace iser::cpu {
namespace {
const IsaKernels kKernels = {"avx2", expert_tile_isa, gemm_tn_isa};
}
const IsaKernels* const kAvx2Kernels = &kKernels;
}  // namespace iser::cpu

#else
namespace iser::cpu {
const IsaKernels* const kAvx2Kernels = nullptr;
}
#endif
