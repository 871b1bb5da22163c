// A fused MoE layer's inputs, the same whatever devices compute it, and an oracle for it: plain
// kernels in f64 that share nothing with the op.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

#include "ffi/cuda/fused_moe.cuh"
#include "tests/cuda/plan_domain.cuh"

namespace iser::cuda {

// Uniform in [-scale, scale), by place alone.
__host__ __device__ inline float hashed(uint64_t seed, uint64_t index, float scale) {
  uint64_t z = (seed << 40) + index + 0x9e3779b97f4a7c15ull;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  z ^= z >> 31;
  return (static_cast<float>(z >> 40) / 8388608.0f - 1.0f) * scale;
}

template <typename T>
__global__ void fill_hashed(T* to, size_t count, uint64_t seed, uint64_t first, float scale) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    to[i] = static_cast<T>(hashed(seed, first + i, scale));
  }
}

inline void fill_random(DType dtype, void* to, size_t count, uint64_t seed, uint64_t first,
                        float scale) {
  if (count == 0) return;
  if (dtype == DType::kBF16) {
    fill_hashed<<<512, 256>>>(static_cast<__nv_bfloat16*>(to), count, seed, first, scale);
  } else {
    fill_hashed<<<512, 256>>>(static_cast<float*>(to), count, seed, first, scale);
  }
  CHECK_CUDA(cudaGetLastError());
}

// One plane of an expert in FP8: values up to `scale` of every magnitude that e4m3 has, blocks that
// differ in their scales.
struct Fp8Plane {
  int32_t rows, columns;
  float scale;

  __host__ __device__ size_t bytes() const { return fp8::plane_bytes(rows, columns); }
  __host__ __device__ const float* scales(const uint8_t* plane) const {
    return reinterpret_cast<const float*>(plane + fp8::plane_values(rows, columns));
  }
};

__global__ void fill_fp8(uint8_t* to, Fp8Plane plane, int32_t count, uint64_t seed,
                         uint64_t first) {
  const size_t values = static_cast<size_t>(plane.rows) * plane.columns;
  const size_t blocks =
      static_cast<size_t>(fp8::num_blocks(plane.rows)) * fp8::num_blocks(plane.columns);
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count * values;
       i += step) {
    const size_t expert = i / values, at = i % values;
    uint8_t* const own = to + expert * plane.bytes();
    own[at] = __nv_cvt_float_to_fp8(hashed(seed, first * values + i, fp8::kMax), __NV_SATFINITE,
                                    __NV_E4M3);
    if (at >= blocks) continue;
    const float vary = 1.0f + hashed(seed + 3, (first + expert) * blocks + at, 0.5f);
    const_cast<float*>(plane.scales(own))[at] = plane.scale / fp8::kMax * vary;
  }
}

__device__ inline float e4m3_value(uint8_t code) {
  return __half2float(__half(__nv_cvt_fp8_to_halfraw(code, __NV_E4M3)));
}

__global__ void dequantize_planes(const uint8_t* from, Fp8Plane plane, int32_t count, float* to) {
  const size_t values = static_cast<size_t>(plane.rows) * plane.columns;
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count * values;
       i += step) {
    const uint8_t* const own = from + i / values * plane.bytes();
    const size_t at = i % values, row = at / plane.columns, column = at % plane.columns;
    const size_t block = row / 128 * fp8::num_blocks(plane.columns) + column / 128;
    to[i] = e4m3_value(own[at]) * plane.scales(own)[block];
  }
}

__device__ inline double as_double(float value) { return value; }
__device__ inline double as_double(__nv_bfloat16 value) { return __bfloat162float(value); }

// Rows as they are after quantisation by 128 columns; a thread a block of columns.
template <typename T>
__global__ void requantize_rows(const T* from, float* to, size_t rows, int32_t columns) {
  const size_t blocks = fp8::num_blocks(columns);
  const size_t index = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= rows * blocks) return;
  const int32_t column = index % blocks * 128, left = columns - column;
  const int32_t count = left < 128 ? left : 128;
  const size_t first = index / blocks * columns + column;
  float amax = 0.0f;
  for (int i = 0; i < count; ++i) amax = fmaxf(amax, fabsf(as_double(from[first + i])));
  amax = fmaxf(amax, fp8::kMinAmax);
  const float up = __fdiv_rn(448.0f, amax), down = __fdiv_rn(amax, 448.0f);
  for (int i = 0; i < count; ++i) {
    const float value = as_double(from[first + i]);
    const uint8_t code = __nv_cvt_float_to_fp8(value * up, __NV_SATFINITE, __NV_E4M3);
    to[first + i] = e4m3_value(code) * down;
  }
}

struct MoeProblem {
  SlotSpace slots;
  int32_t top_k, hidden, intermediate, num_tokens;  // tokens of a rank
  DType dtype = DType::kBF16;
  int32_t num_layers = 1, layer = 0;
  bool is_stacked = false;
  std::vector<std::vector<int32_t>> ids;  // [rank][num_tokens * top_k]
  bool has_fp8_weights = false;           // else in elements of x's type
  bool has_biases = false;
  Activation activation;

  bool is_fp8() const { return has_fp8_weights; }
  Fp8Plane fp8_plane(int32_t which) const {
    return which == 2 ? Fp8Plane{hidden, intermediate, plane_scale(2)}
                      : Fp8Plane{intermediate, hidden, plane_scale(which)};
  }
  int32_t element_bytes() const { return dtype == DType::kBF16 ? 2 : 4; }
  DomainShape shape(int32_t num_banks) const {
    DomainShape of_elements =
        make_shape(slots, top_k, hidden, intermediate, num_tokens, element_bytes(), num_banks);
    of_elements.has_biases = has_biases;
    of_elements.activation = activation;
    return is_fp8() ? iser::in_fp8(of_elements) : of_elements;
  }
  size_t num_routes() const { return static_cast<size_t>(num_tokens) * top_k; }
  size_t plane() const { return static_cast<size_t>(hidden) * intermediate; }
  PlanConfig config(bool is_balanced) const {
    return {slots, 1, 0, is_balanced ? 0 : INT32_MAX, CopyRule::kPerSlot};
  }
  float plane_scale(int32_t which) const {
    return std::sqrt(3.0f / static_cast<float>(which == 2 ? intermediate : hidden));
  }
  float weight(int32_t rank, size_t route) const {
    return (1.5f + hashed(9, rank * num_routes() + route, 1.0f)) / static_cast<float>(top_k);
  }

  // Plane `which` of `count` experts of a layer, from the one of that index on. Biases are about as
  // large as the sums that they are added to.
  void fill_experts(void* to, int32_t which, int32_t at_layer, int32_t first, int32_t count) const {
    const uint64_t expert = static_cast<uint64_t>(at_layer) * slots.num_experts + first;
    if (which >= kNumWeightPlanes) {
      const size_t columns = which == kDownBiasPlane ? hidden : intermediate;
      fill_random(DType::kF32, to, count * columns, 11 + which, expert * columns, 1.0f);
    } else if (is_fp8()) {
      fill_fp8<<<512, 256>>>(static_cast<uint8_t*>(to), fp8_plane(which), count, 1 + which, expert);
      CHECK_CUDA(cudaGetLastError());
    } else {
      fill_random(dtype, to, count * plane(), 1 + which, expert * plane(), plane_scale(which));
    }
  }
  // The same, and rank's tokens, as the numbers that they stand for.
  template <typename T>
  void fill_values(T* to, int32_t which, int32_t at_layer) const {
    if constexpr (std::is_same_v<T, float>) {
      if (is_fp8()) {
        const Fp8Plane plane = fp8_plane(which);
        DeviceArray<uint8_t> planes(slots.num_experts * plane.bytes());
        fill_experts(planes.data, which, at_layer, 0, slots.num_experts);
        dequantize_planes<<<512, 256>>>(planes.data, plane, slots.num_experts, to);
        CHECK_CUDA(cudaDeviceSynchronize());
        return;
      }
    }
    fill_experts(to, which, at_layer, 0, slots.num_experts);
  }
  template <typename T>
  void fill_token_values(T* to, int32_t rank) const {
    if constexpr (std::is_same_v<T, float>) {
      if (is_fp8()) {
        const size_t count = static_cast<size_t>(num_tokens) * hidden;
        DeviceArray<__nv_bfloat16> tokens(count);
        fill_tokens(tokens.data, rank);
        requantize(tokens.data, to, num_tokens, hidden);
        return;
      }
    }
    fill_tokens(to, rank);
  }
  template <typename T>
  static void requantize(const T* from, float* to, size_t rows, int32_t columns) {
    const size_t threads = rows * fp8::num_blocks(columns);
    requantize_rows<<<threads / 128 + 1, 128>>>(from, to, rows, columns);
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  void fill_tokens(void* to, int32_t rank) const {
    const size_t count = static_cast<size_t>(num_tokens) * hidden;
    fill_random(dtype, to, count, 5, rank * count, 1.0f);
  }
};

// ids of one of the workloads of plan_cases.h, some of them padding.
inline MoeProblem make_problem(const SlotSpace& slots, int32_t top_k, int32_t hidden,
                               int32_t intermediate, int32_t num_tokens, int kind, uint32_t seed,
                               DType dtype = DType::kBF16) {
  MoeProblem problem{slots, top_k, hidden, intermediate, num_tokens, dtype};
  std::mt19937 rng(seed);
  problem.ids = draw_ids(rng, kind, problem.config(true), problem.num_routes());
  return problem;
}

__device__ inline void round_to(double value, float* to) { *to = static_cast<float>(value); }
__device__ inline void round_to(double value, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(static_cast<float>(value));
}

__device__ inline double activated(const Activation& activation, double gate, double up) {
  const auto sigmoid = [](double x) { return 1.0 / (1.0 + exp(-x)); };
  if (activation.kind == ActivationKind::kGeluTanh) {
    const double inner = sqrt(2.0 / 3.14159265358979) * (gate + 0.044715 * gate * gate * gate);
    return 0.5 * gate * (1.0 + tanh(inner)) * up;
  }
  if (activation.kind == ActivationKind::kClampedSwiglu) {
    const double limit = activation.limit;
    gate = gate < limit ? gate : limit;
    up = up < -limit ? -limit : up < limit ? up : limit;
    return gate * sigmoid(activation.alpha * gate) * (up + activation.offset);
  }
  return gate * sigmoid(gate) * up;
}

template <typename T>
struct OracleArrays {
  const T *x, *gate, *up, *down;                 // x [routes' tokens, D]; weights of all experts
  const float *gate_bias, *up_bias, *down_bias;  // of all experts, or null
  Activation activation;
  const int32_t* ids;  // [routes]
  T *h, *o;            // [routes, I], [routes, D]; zeros for routes that are padding
  float* magnitude;    // [routes, D] sum of |h| |down| and of |bias|
  int32_t routes, top_k, hidden, intermediate, num_experts;
};

template <typename T>
__global__ void oracle_inner(OracleArrays<T> a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<int64_t>(a.routes) * a.intermediate) return;
  const int32_t route = index / a.intermediate, i = index % a.intermediate, expert = a.ids[route];
  if (!is_valid_expert(expert, a.num_experts)) return round_to(0, a.h + index);
  const T* x = a.x + static_cast<size_t>(route / a.top_k) * a.hidden;
  const size_t row = (static_cast<size_t>(expert) * a.intermediate + i) * a.hidden;
  double gate = 0, up = 0;
  for (int32_t d = 0; d < a.hidden; ++d) {
    gate += as_double(x[d]) * as_double(a.gate[row + d]);
    up += as_double(x[d]) * as_double(a.up[row + d]);
  }
  if (a.gate_bias != nullptr) {
    gate += a.gate_bias[static_cast<size_t>(expert) * a.intermediate + i];
    up += a.up_bias[static_cast<size_t>(expert) * a.intermediate + i];
  }
  round_to(activated(a.activation, gate, up), a.h + index);
}

template <typename T>
__global__ void oracle_hidden(OracleArrays<T> a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<int64_t>(a.routes) * a.hidden) return;
  const int32_t route = index / a.hidden, d = index % a.hidden, expert = a.ids[route];
  if (!is_valid_expert(expert, a.num_experts)) {
    a.magnitude[index] = 0;
    return round_to(0, a.o + index);
  }
  const T* h = a.h + static_cast<size_t>(route) * a.intermediate;
  const size_t row = (static_cast<size_t>(expert) * a.hidden + d) * a.intermediate;
  double sum = 0, magnitude = 0;
  for (int32_t i = 0; i < a.intermediate; ++i) {
    const double term = as_double(h[i]) * as_double(a.down[row + i]);
    sum += term;
    magnitude += fabs(term);
  }
  if (a.down_bias != nullptr) {
    const double bias = a.down_bias[static_cast<size_t>(expert) * a.hidden + d];
    sum += bias;
    magnitude += fabs(bias);
  }
  round_to(sum, a.o + index);
  a.magnitude[index] = static_cast<float>(magnitude);
}

inline float element_of(DType dtype, const uint8_t* bytes, size_t index) {
  if (dtype == DType::kF32) return reinterpret_cast<const float*>(bytes)[index];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(bytes)[index] << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// What y should be, and how far a right y may lie from it.
//
// bf16: an expert's output may be rounded to the neighbour (2^-8 of it, twice for safety), each h
// too (2^-9 of the sum of |h| |down|, a small part of what a wrong term would change), and y is
// rounded once. f32: 2^-17 of the sum covers any order of up to 10^4 sums. FP8: tensor cores keep
// some 13 bits of a block's sum, so that of an h in fifty the neighbour is stored, an eighth away:
// an element is held to 2^-5 of the sum; in the norm y to 2 %, and each row and column to 8 %.
struct Expected {
  static constexpr double kFp8Norm = 0.02, kFp8LineNorm = 0.08;
  std::vector<double> y, bound;  // [P * num_tokens, D]

  template <typename T>
  void compute(const MoeProblem& p, int32_t ranks) {
    CHECK_CUDA(cudaSetDevice(0));
    const int32_t experts = p.slots.num_experts;
    const size_t routes = p.num_routes(), tokens = static_cast<size_t>(p.num_tokens) * p.hidden;
    DeviceArray<T> x(tokens), h(routes * p.intermediate), o(routes * p.hidden);
    DeviceArray<T> gate(experts * p.plane()), up(experts * p.plane()), down(experts * p.plane());
    DeviceArray<float> magnitude(routes * p.hidden);
    DeviceArray<int32_t> ids(routes);
    const size_t inner_biases = p.has_biases ? size_t(experts) * p.intermediate : 0;
    DeviceArray<float> gate_bias(inner_biases), up_bias(inner_biases);
    DeviceArray<float> down_bias(p.has_biases ? size_t(experts) * p.hidden : 0);
    const int32_t layer = p.is_stacked ? p.layer : 0;
    T* const planes[3] = {gate.data, up.data, down.data};
    for (int i = 0; i < 3; ++i) p.fill_values(planes[i], i, layer);
    if (p.has_biases) {
      p.fill_experts(gate_bias.data, kGateBiasPlane, layer, 0, experts);
      p.fill_experts(up_bias.data, kUpBiasPlane, layer, 0, experts);
      p.fill_experts(down_bias.data, kDownBiasPlane, layer, 0, experts);
    }
    for (int32_t rank = 0; rank < ranks; ++rank) {
      p.fill_token_values(x.data, rank);
      ids.put(p.ids[rank]);
      const auto if_any = [&](const DeviceArray<float>& array) {
        return p.has_biases ? array.data : nullptr;
      };
      const OracleArrays<T> arrays{x.data,
                                   gate.data,
                                   up.data,
                                   down.data,
                                   if_any(gate_bias),
                                   if_any(up_bias),
                                   if_any(down_bias),
                                   p.activation,
                                   ids.data,
                                   h.data,
                                   o.data,
                                   magnitude.data,
                                   static_cast<int32_t>(routes),
                                   p.top_k,
                                   p.hidden,
                                   p.intermediate,
                                   experts};
      const auto grid = [&](size_t columns) { return (routes * columns + 127) / 128 + 1; };
      oracle_inner<<<grid(p.intermediate), 128>>>(arrays);
      if constexpr (std::is_same_v<T, float>) {
        if (p.is_fp8()) p.requantize(h.data, h.data, routes, p.intermediate);
      }
      oracle_hidden<<<grid(p.hidden), 128>>>(arrays);
      CHECK_CUDA(cudaDeviceSynchronize());
      sum_up(p, rank, o.get(), magnitude.get());
    }
  }

  template <typename T>
  void sum_up(const MoeProblem& p, int32_t rank, const std::vector<T>& o,
              const std::vector<float>& magnitude) {
    const bool is_bf16 = p.dtype == DType::kBF16;
    const DType stored = p.is_fp8() ? DType::kF32 : p.dtype;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(o.data());
    for (int32_t t = 0; t < p.num_tokens; ++t) {
      for (int32_t d = 0; d < p.hidden; ++d) {
        double sum = 0, absolute = 0, terms = 0;
        for (int32_t k = 0; k < p.top_k; ++k) {
          const size_t route = static_cast<size_t>(t) * p.top_k + k;
          if (!is_valid_expert(p.ids[rank][route], p.slots.num_experts)) continue;
          const double value = element_of(stored, bytes, route * p.hidden + d);
          const double weight = p.weight(rank, route);
          sum += weight * value;
          absolute += std::fabs(weight * value);
          terms += weight * magnitude[route * p.hidden + d];
        }
        y.push_back(sum);
        // An h that falls to its other neighbour moves the sum by 2^-8 of its term, and with few
        // terms one is up to half of them all.
        bound.push_back(p.is_fp8() ? std::ldexp(absolute, -7) + std::ldexp(terms, -5) + 1e-30
                        : is_bf16  ? std::ldexp(absolute, -7) + std::ldexp(terms, -9) + 1e-30
                                   : std::ldexp(terms, -17) + 1e-30);
      }
    }
  }

  explicit Expected(const MoeProblem& p) : Expected(p, p.slots.num_ranks) {}
  // Of the first ranks only.
  Expected(const MoeProblem& p, int32_t ranks) {
    p.dtype == DType::kBF16 && !p.is_fp8() ? compute<__nv_bfloat16>(p, ranks)
                                           : compute<float>(p, ranks);
  }

  std::string compare(const MoeProblem& p, const std::vector<uint8_t>& got) const {
    for (size_t i = 0; i < y.size(); ++i) {
      const double value = element_of(p.dtype, got.data(), i);
      if (std::fabs(value - y[i]) <= bound[i]) continue;  // false for NaN too
      char text[160];
      std::snprintf(text, sizeof text, "y[%zu, %zu] is %.6g, should be %.6g within %.2g",
                    i / p.hidden, i % p.hidden, value, y[i], bound[i]);
      return text;
    }
    return p.is_fp8() ? compare_norms(p, got) : "";
  }

  // y, and every row and every column of it, by the norm.
  std::string compare_norms(const MoeProblem& p, const std::vector<uint8_t>& got) const {
    const size_t rows = y.size() / p.hidden;
    const size_t all = rows + p.hidden;
    std::vector<double> off(all + 1), norm(all + 1);
    for (size_t i = 0; i < y.size(); ++i) {
      const double error = element_of(p.dtype, got.data(), i) - y[i];
      for (size_t at : {i / p.hidden, rows + i % p.hidden, all}) {
        off[at] += error * error;
        norm[at] += y[i] * y[i];
      }
    }
    for (size_t at = 0; at < off.size(); ++at) {
      const double bound = at < all ? kFp8LineNorm : kFp8Norm;
      if (std::sqrt(off[at]) <= bound * std::sqrt(norm[at]) + 1e-30) continue;
      char text[160];
      std::snprintf(text, sizeof text, "%s %zu of y is off by %.3g of its norm",
                    at < rows  ? "row"
                    : at < all ? "column"
                               : "all",
                    at < rows ? at : at - rows, std::sqrt(off[at] / norm[at]));
      return text;
    }
    return "";
  }
};

}  // namespace iser::cuda
