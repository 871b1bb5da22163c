// expert_tile in standard C++, for CPUs without the instructions of the other files and as their
// reference. Slow where std::fma is a library call; the bits are the same.
#include <cmath>
#include <cstdint>
#include <cstring>

#include "ffi/cpu/gemm_isa.h"

namespace iser::cpu {
namespace {

struct Vec {
  using Reg = float;
  static constexpr int kLanes = 1, kPanelVecs = 3, kRowStep = 1, kMaxRowSteps = 4;
  static Reg load(const float* p) { return *p; }
  static void store(float* p, Reg a) { *p = a; }
  static Reg set1(float a) { return a; }
  static Reg fma(Reg a, Reg b, Reg c) { return std::fma(a, b, c); }
  static Reg add(Reg a, Reg b) { return a + b; }
  static Reg sub(Reg a, Reg b) { return a - b; }
  static Reg mul(Reg a, Reg b) { return a * b; }
  static Reg div(Reg a, Reg b) { return a / b; }
  static Reg min_keep_nan(Reg limit, Reg a) { return limit < a ? limit : a; }
  static Reg max_keep_nan(Reg limit, Reg a) { return limit > a ? limit : a; }
  static Reg half_pow2_of_shifted(Reg shifted) {
    return from_bits((to_bits(shifted) - (0x4b400000u - 126u)) << 23);
  }
  static Reg quiet_nan(Reg a) { return a == a ? a : from_bits(0x7fc00000u); }
  static Reg widen_bf16(const uint16_t* p) { return from_bits(uint32_t{*p} << 16); }
  static Reg round_bf16(Reg a) {
    const uint32_t bits = to_bits(a);
    return a == a ? from_bits((bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u)
                  : from_bits(0x7fc00000u);
  }

 private:
  static uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
  }
  static float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
};

}  // namespace
}  // namespace iser::cpu

#include "ffi/cpu/gemm_kernel.h"

namespace iser::cpu {
namespace {
const IsaKernels kKernels = {"portable", expert_tile_isa, gemm_tn_isa};
}
const IsaKernels* const kPortableKernels = &kKernels;
}  // namespace iser::cpu
