// expert_tile with NEON: 8 weight rows x 8 tile rows a step. No flags: every aarch64 CPU has it.
#include "ffi/cpu/gemm_isa.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#include <cstdint>

namespace iser::cpu {
namespace {

struct Vec {
  using Reg = float32x4_t;
  static constexpr int kLanes = 4, kPanelVecs = 3, kRowStep = 2, kMaxRowSteps = 4;
  static Reg load(const float* p) { return vld1q_f32(p); }
  static void store(float* p, Reg a) { vst1q_f32(p, a); }
  static Reg set1(float a) { return vdupq_n_f32(a); }
  static Reg fma(Reg a, Reg b, Reg c) { return vfmaq_f32(c, a, b); }
  static Reg add(Reg a, Reg b) { return vaddq_f32(a, b); }
  static Reg sub(Reg a, Reg b) { return vsubq_f32(a, b); }
  static Reg mul(Reg a, Reg b) { return vmulq_f32(a, b); }
  static Reg div(Reg a, Reg b) { return vdivq_f32(a, b); }
  static Reg min_keep_nan(Reg limit, Reg a) { return vbslq_f32(vcltq_f32(limit, a), limit, a); }
  static Reg max_keep_nan(Reg limit, Reg a) { return vbslq_f32(vcgtq_f32(limit, a), limit, a); }
  static Reg half_pow2_of_shifted(Reg shifted) {
    const uint32x4_t n = vsubq_u32(vreinterpretq_u32_f32(shifted), vdupq_n_u32(0x4b400000 - 126));
    return vreinterpretq_f32_u32(vshlq_n_u32(n, 23));
  }
  static Reg quiet_nan(Reg a) {
    return vbslq_f32(vceqq_f32(a, a), a, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)));
  }
  static Reg widen_bf16(const uint16_t* p) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
  }
  static Reg round_bf16(Reg a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t sum = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const Reg kept = vreinterpretq_f32_u32(vandq_u32(sum, vdupq_n_u32(0xffff0000u)));
    return vbslq_f32(vceqq_f32(a, a), kept, vreinterpretq_f32_u32(vdupq_n_u32(0x7fc00000)));
  }
};

}  // namespace
}  // namespace iser::cpu

#include "ffi/cpu/gemm_kernel.h"

namespace iser::cpu {
namespace {
const IsaKernels kKernels = {"neon", expert_tile_isa, gemm_tn_isa};
}
const IsaKernels* const kNeonKernels = &kKernels;
}  // namespace iser::cpu

#else
namespace iser::cpu {
const IsaKernels* const kNeonKernels = nullptr;
}
#endif
