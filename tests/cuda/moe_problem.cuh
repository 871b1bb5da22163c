// A fused MoE layer's inputs, the same whatever devices compute it, and an oracle for it: plain
// kernels in f64 that share nothing with the op.
#pragma once

#include <cuda_bf16.h>

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
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

struct MoeProblem {
  SlotSpace slots;
  int32_t top_k, hidden, intermediate, num_tokens;  // tokens of a rank
  DType dtype = DType::kBF16;
  int32_t num_layers = 1, layer = 0;
  bool is_stacked = false;
  std::vector<std::vector<int32_t>> ids;  // [rank][num_tokens * top_k]

  int32_t element_bytes() const { return dtype == DType::kBF16 ? 2 : 4; }
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

  // Plane `which` of `count` experts of a layer, from the one of that index on.
  void fill_experts(void* to, int32_t which, int32_t at_layer, int32_t first, int32_t count) const {
    const uint64_t begin = (static_cast<uint64_t>(at_layer) * slots.num_experts + first) * plane();
    fill_random(dtype, to, count * plane(), 1 + which, begin, plane_scale(which));
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

__device__ inline double as_double(float value) { return value; }
__device__ inline double as_double(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void round_to(double value, float* to) { *to = static_cast<float>(value); }
__device__ inline void round_to(double value, __nv_bfloat16* to) {
  *to = __float2bfloat16_rn(static_cast<float>(value));
}

template <typename T>
struct OracleArrays {
  const T *x, *gate, *up, *down;  // x [routes' tokens, D]; weights of all experts
  const int32_t* ids;             // [routes]
  T *h, *o;                       // [routes, I], [routes, D]
  float* magnitude;               // [routes, D] sum of |h| |down|
  int32_t routes, top_k, hidden, intermediate, num_experts;
};

template <typename T>
__global__ void oracle_inner(OracleArrays<T> a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<int64_t>(a.routes) * a.intermediate) return;
  const int32_t route = index / a.intermediate, i = index % a.intermediate, expert = a.ids[route];
  if (!is_valid_expert(expert, a.num_experts)) return;
  const T* x = a.x + static_cast<size_t>(route / a.top_k) * a.hidden;
  const size_t row = (static_cast<size_t>(expert) * a.intermediate + i) * a.hidden;
  double gate = 0, up = 0;
  for (int32_t d = 0; d < a.hidden; ++d) {
    gate += as_double(x[d]) * as_double(a.gate[row + d]);
    up += as_double(x[d]) * as_double(a.up[row + d]);
  }
  round_to(gate / (1.0 + exp(-gate)) * up, a.h + index);
}

template <typename T>
__global__ void oracle_hidden(OracleArrays<T> a) {
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (index >= static_cast<int64_t>(a.routes) * a.hidden) return;
  const int32_t route = index / a.hidden, d = index % a.hidden, expert = a.ids[route];
  if (!is_valid_expert(expert, a.num_experts)) return;
  const T* h = a.h + static_cast<size_t>(route) * a.intermediate;
  const size_t row = (static_cast<size_t>(expert) * a.hidden + d) * a.intermediate;
  double sum = 0, magnitude = 0;
  for (int32_t i = 0; i < a.intermediate; ++i) {
    const double term = as_double(h[i]) * as_double(a.down[row + i]);
    sum += term;
    magnitude += fabs(term);
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
// rounded once. f32: 2^-17 of the sum covers any order of up to 10^4 sums.
struct Expected {
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
    const int32_t layer = p.is_stacked ? p.layer : 0;
    T* const planes[3] = {gate.data, up.data, down.data};
    for (int i = 0; i < 3; ++i) p.fill_experts(planes[i], i, layer, 0, experts);
    for (int32_t rank = 0; rank < ranks; ++rank) {
      p.fill_tokens(x.data, rank);
      ids.put(p.ids[rank]);
      const OracleArrays<T> arrays{x.data,    gate.data,      up.data,
                                   down.data, ids.data,       h.data,
                                   o.data,    magnitude.data, static_cast<int32_t>(routes),
                                   p.top_k,   p.hidden,       p.intermediate,
                                   experts};
      const auto grid = [&](size_t columns) { return (routes * columns + 127) / 128 + 1; };
      oracle_inner<<<grid(p.intermediate), 128>>>(arrays);
      oracle_hidden<<<grid(p.hidden), 128>>>(arrays);
      CHECK_CUDA(cudaDeviceSynchronize());
      sum_up(p, rank, o.get(), magnitude.get());
    }
  }

  template <typename T>
  void sum_up(const MoeProblem& p, int32_t rank, const std::vector<T>& o,
              const std::vector<float>& magnitude) {
    const bool is_bf16 = p.dtype == DType::kBF16;
    const uint8_t* bytes = reinterpret_cast<const uint8_t*>(o.data());
    for (int32_t t = 0; t < p.num_tokens; ++t) {
      for (int32_t d = 0; d < p.hidden; ++d) {
        double sum = 0, absolute = 0, terms = 0;
        for (int32_t k = 0; k < p.top_k; ++k) {
          const size_t route = static_cast<size_t>(t) * p.top_k + k;
          if (!is_valid_expert(p.ids[rank][route], p.slots.num_experts)) continue;
          const double value = element_of(p.dtype, bytes, route * p.hidden + d);
          const double weight = p.weight(rank, route);
          sum += weight * value;
          absolute += std::fabs(weight * value);
          terms += weight * magnitude[route * p.hidden + d];
        }
        y.push_back(sum);
        // An h that falls to its other neighbour moves the sum by 2^-8 of its term, and with few
        // terms one is up to half of them all.
        bound.push_back(is_bf16 ? std::ldexp(absolute, -7) + std::ldexp(terms, -9) + 1e-30
                                : std::ldexp(terms, -17) + 1e-30);
      }
    }
  }

  explicit Expected(const MoeProblem& p) : Expected(p, p.slots.num_ranks) {}
  // Of the first ranks only.
  Expected(const MoeProblem& p, int32_t ranks) {
    p.dtype == DType::kBF16 ? compute<__nv_bfloat16>(p, ranks) : compute<float>(p, ranks);
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
    return "";
  }
};

}  // namespace iser::cuda
