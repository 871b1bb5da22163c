// expert_tile with AVX-512: 12 weight rows x 32 tile rows a step. Compiled with -mavx512f
// -mavx512bw -mavx512vl -mfma.
#include "ffi/cpu/gemm_isa.h"

#if defined(__x86_64__) || defined(_M_X64)
#ifndef __AVX512F__
#error "gemm_avx512.cc needs -mavx512f -mavx512bw -mavx512vl -mfma (this file alone)"
#endif
#include <immintrin.h>

#include <cstdint>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored \
    "-Wmaybe-uninitialized"  // GCC's own header starts results from an undefined register
#endif

namespace iser::cpu {
namespace {

struct Vec {
  using Reg = __m512;
  static constexpr int kLanes = 16, kPanelVecs = 2, kRowStep = 4, kMaxRowSteps = 3;
  static Reg load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Reg a) { _mm512_storeu_ps(p, a); }
  static Reg set1(float a) { return _mm512_set1_ps(a); }
  static Reg fma(Reg a, Reg b, Reg c) { return _mm512_fmadd_ps(a, b, c); }
  static Reg add(Reg a, Reg b) { return _mm512_add_ps(a, b); }
  static Reg sub(Reg a, Reg b) { return _mm512_sub_ps(a, b); }
  static Reg mul(Reg a, Reg b) { return _mm512_mul_ps(a, b); }
  static Reg div(Reg a, Reg b) { return _mm512_div_ps(a, b); }
  static Reg min_keep_nan(Reg limit, Reg a) {
    return _mm512_min_ps(limit, a);
  }  // the second operand if either is NaN
  static Reg max_keep_nan(Reg limit, Reg a) { return _mm512_max_ps(limit, a); }
  static Reg half_pow2_of_shifted(Reg shifted) {
    const __m512i n =
        _mm512_sub_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(0x4b400000 - 126));
    return _mm512_castsi512_ps(_mm512_slli_epi32(n, 23));
  }
  static Reg quiet_nan(Reg a) {
    return _mm512_mask_mov_ps(a, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q),
                              _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000)));
  }
  static Reg widen_bf16(const uint16_t* p) {
    const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
  }
  static Reg round_bf16(Reg a) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __m512i kept = _mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(kept, is_nan, _mm512_set1_epi32(0x7fc00000)));
  }
};

}  // namespace
}  // namespace iser::cpu

#include "ffi/cpu/gemm_kernel.h"

namespace iser::cpu {
namespace {
const IsaKernels kKernels = {"avx512", expert_tile_isa, gemm_tn_isa};
}
const IsaKernels* const kAvx512Kernels = &kKernels;
}  // namespace iser::cpu

#else
namespace iser::cpu {
const IsaKernels* const kAvx512Kernels = nullptr;
}
#endif
