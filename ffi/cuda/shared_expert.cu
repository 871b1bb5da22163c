// cuBLAS comes by dlopen: the package links nothing that a CPU lacks, and finds what jax has
// loaded.
#include "ffi/cuda/shared_expert.cuh"

#include <cuda_bf16.h>
#include <dlfcn.h>

#include <mutex>

#include "ffi/core/layout.h"

namespace iser::cuda {
namespace {

// The entry points used here; enumerators of cuBLAS by value.
struct Cublas {
  int (*create)(void**) = nullptr;
  int (*set_stream)(void*, cudaStream_t) = nullptr;
  int (*set_workspace)(void*, void*, size_t) = nullptr;
  int (*set_sms)(void*, int) = nullptr;
  int (*gemm)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
              int, const void*, void*, int, int, int, int) = nullptr;
};
constexpr int kCublasF32 = 0, kCublasBF16 = 14, kComputeF32 = 68, kDefaultAlgorithm = -1;
constexpr int kTransposed = 1, kAsIs = 0;
constexpr int kActivationThreads = 256, kMaxActivationCtas = 4096;

Cublas cublas;
bool is_loaded = false;
std::mutex loading;

template <typename F>
bool bind(void* library, const char* name, F& function) {
  function = reinterpret_cast<F>(dlsym(library, name));
  return function != nullptr;
}

void* open_cublas(const std::string& path) {
  if (!path.empty()) return dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return library;
  }
  return nullptr;
}

int element_bytes(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

__device__ inline float to_f32(float value) { return value; }
__device__ inline float to_f32(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void store(float* to, float value) { *to = value; }
__device__ inline void store(__nv_bfloat16* to, float value) { *to = __float2bfloat16_rn(value); }

// gate = act(gate, up).
template <typename T>
__global__ void __launch_bounds__(kActivationThreads)
    activation_kernel(T* gate, const T* up, int64_t count, Activation activation) {
  const bool is_silu = activation.kind == ActivationKind::kSilu;
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += step) {
    const float g = to_f32(gate[i]);
    const float u = to_f32(up[i]);
    store(gate + i, is_silu ? g / (1.0f + __expf(-g)) * u : apply_activation(activation, g, u));
  }
}

cudaError_t launch_activation(const SharedExpertLaunch& launch, void* up, cudaStream_t stream) {
  const int64_t count = int64_t{launch.tokens} * launch.inner;
  const int64_t ctas = (count + kActivationThreads - 1) / kActivationThreads;
  int64_t most = launch.num_sms > 0 ? int64_t{launch.num_sms} * (2048 / kActivationThreads)
                                    : kMaxActivationCtas;
  const unsigned grid = static_cast<unsigned>(ctas < most ? ctas : most);
  if (launch.dtype == DType::kF32) {
    activation_kernel<<<grid, kActivationThreads, 0, stream>>>(static_cast<float*>(launch.planes),
                                                               static_cast<const float*>(up), count,
                                                               launch.activation);
  } else {
    activation_kernel<<<grid, kActivationThreads, 0, stream>>>(
        static_cast<__nv_bfloat16*>(launch.planes), static_cast<const __nv_bfloat16*>(up), count,
        launch.activation);
  }
  return cudaGetLastError();
}

// Row-major c[m, n] = a[m, k] b[n, k]^T.
int multiply(void* handle, DType dtype, const void* a, const void* b, void* c, int m, int n,
             int k) {
  const int type = dtype == DType::kF32 ? kCublasF32 : kCublasBF16;
  const float one = 1, zero = 0;
  return cublas.gemm(handle, kTransposed, kAsIs, n, m, k, &one, b, type, k, a, type, k, &zero, c,
                     type, n, kComputeF32, kDefaultAlgorithm);
}

size_t plane_bytes(int64_t tokens, int64_t inner, DType dtype) {
  return align_up(static_cast<size_t>(tokens * inner) * element_bytes(dtype), 256);
}

}  // namespace

size_t shared_expert_bytes(int64_t tokens, int64_t inner, DType dtype) {
  return 2 * plane_bytes(tokens, inner, dtype) + kSharedExpertScratch;
}

std::string load_cublas(const std::string& path) {
  std::lock_guard lock(loading);
  if (is_loaded) return "";
  void* library = open_cublas(path);
  if (!library) {
    const char* why = dlerror();
    return std::string("cuBLAS could not be opened (") + (why ? why : "no reason given") +
           "); install jax's CUDA packages, or name the library in ISER_CUBLAS_LIBRARY";
  }
  Cublas found;
  if (!bind(library, "cublasCreate_v2", found.create) ||
      !bind(library, "cublasSetStream_v2", found.set_stream) ||
      !bind(library, "cublasSetWorkspace_v2", found.set_workspace) ||
      !bind(library, "cublasSetSmCountTarget", found.set_sms) ||
      !bind(library, "cublasGemmEx", found.gemm)) {
    return "this cuBLAS lacks an entry point that shared_expert uses; it needs CUDA 12 or later";
  }
  cublas = found;
  is_loaded = true;
  return "";
}

std::string make_cublas(void** handle) {
  if (!is_loaded) return "load_cublas was not called";
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, activation_kernel<float>);
  if (error == cudaSuccess)
    error = cudaFuncGetAttributes(&attributes, activation_kernel<__nv_bfloat16>);
  if (error != cudaSuccess)
    return std::string("loading the activation: ") + cudaGetErrorName(error);
  const int status = cublas.create(handle);
  return status == 0 ? "" : "cublasCreate failed with status " + std::to_string(status);
}

std::string launch_shared_expert(void* handle, const SharedExpertLaunch& launch,
                                 cudaStream_t stream) {
  if (launch.tokens == 0) return "";
  uint8_t* up =
      static_cast<uint8_t*>(launch.planes) + plane_bytes(launch.tokens, launch.inner, launch.dtype);
  uint8_t* scratch = up + plane_bytes(launch.tokens, launch.inner, launch.dtype);
  const auto product = [&](const void* a, const void* b, void* c, int n, int k) {
    return multiply(handle, launch.dtype, a, b, c, launch.tokens, n, k);
  };
  int status = cublas.set_stream(handle, stream);  // resets the workspace, so before it
  if (status == 0) status = cublas.set_workspace(handle, scratch, kSharedExpertScratch);
  if (status == 0) status = cublas.set_sms(handle, launch.num_sms);
  if (status == 0)
    status = product(launch.x, launch.gate, launch.planes, launch.inner, launch.hidden);
  if (status == 0) status = product(launch.x, launch.up, up, launch.inner, launch.hidden);
  if (status == 0) {
    const cudaError_t error = launch_activation(launch, up, stream);
    if (error != cudaSuccess)
      return std::string("launching the activation: ") + cudaGetErrorName(error);
    status = product(launch.planes, launch.down, launch.y, launch.hidden, launch.inner);
  }
  return status == 0 ? "" : "cuBLAS failed with status " + std::to_string(status);
}

}  // namespace iser::cuda
