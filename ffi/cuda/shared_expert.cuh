// The shared expert with a budget of SMs: three products of cuBLAS, which takes one, an activation
// between, so that the SMs of the copy beside it are free by construction.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>

#include "ffi/core/activation.h"
#include "ffi/cuda/fused_moe.cuh"

namespace iser::cuda {

constexpr size_t kSharedExpertScratch = size_t{32} << 20;  // of cuBLAS, beside the inner planes

struct SharedExpertLaunch {
  const void* x;     // [tokens, hidden]
  const void* gate;  // [inner, hidden]
  const void* up;    // [inner, hidden]
  const void* down;  // [hidden, inner]
  void* y;           // [tokens, hidden]
  void* planes;      // [2, tokens, inner], then kSharedExpertScratch
  int32_t tokens, hidden, inner;
  DType dtype;
  int32_t num_sms;  // 0: all
  Activation activation;
};

size_t shared_expert_bytes(int64_t tokens, int64_t inner, DType dtype);

// Opens cuBLAS, once a process: `path`, or where it is empty the library by its name. An error's
// text, empty where all is well.
std::string load_cublas(const std::string& path);

// A handle on the current device; after load_cublas.
std::string make_cublas(void** handle);

// Products in f32 sums rounded to the dtype (cuBLAS chooses its kernels, so that bits may depend on
// the number of tokens); the activation in f32, rounded once.
std::string launch_shared_expert(void* handle, const SharedExpertLaunch& launch,
                                 cudaStream_t stream);

}  // namespace iser::cuda
