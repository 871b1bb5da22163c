// NCCL and cuBLAS by dlopen: the benchmarks build with nvcc alone and say so where one is missing.
// The declarations are the few entry points used here; enumerators are given by value.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace bench {

// Opens the library named by the environment variable, or the first of the names that loads.
inline void* open_library(const char* variable, std::initializer_list<const char*> names) {
  const char* given = std::getenv(variable);
  if (given && *given) return dlopen(given, RTLD_NOW | RTLD_GLOBAL);
  for (const char* name : names) {
    if (void* library = dlopen(name, RTLD_NOW | RTLD_GLOBAL)) return library;
  }
  return nullptr;
}

template <typename F>
bool bind(void* library, const char* name, F& function) {
  function = library ? reinterpret_cast<F>(dlsym(library, name)) : nullptr;
  return function != nullptr;
}

// A communicator over the devices of this process.
class Nccl {
 public:
  Nccl() {
    setenv("NCCL_NVLS_ENABLE", "0", 1);  // never a multicast object
    void* library = open_library("ISER_NCCL_LIBRARY", {"libnccl.so.2", "libnccl.so"});
    is_loaded_ = bind(library, "ncclCommInitAll", init_) &&
                 bind(library, "ncclGetVersion", get_version_) &&
                 bind(library, "ncclGroupStart", start_) && bind(library, "ncclGroupEnd", end_) &&
                 bind(library, "ncclBroadcast", broadcast_);
    int version = 0;
    if (is_loaded_ && get_version_(&version) == 0) version_ = version;
  }

  bool init(int num_devices) { return is_loaded_ && init_(comms_, num_devices, nullptr) == 0; }
  int version() const { return version_; }

  // Device 0's buffer to all.
  bool broadcast(void* const* buffers, size_t bytes, int num_devices, cudaStream_t const* streams) {
    constexpr int kNcclInt8 = 0;
    bool ok = start_() == 0;
    for (int d = 0; d < num_devices; ++d) {
      ok &= broadcast_(buffers[d], buffers[d], bytes, kNcclInt8, 0, comms_[d], streams[d]) == 0;
    }
    return ok && end_() == 0;
  }

 private:
  int (*init_)(void**, int, const int*) = nullptr;
  int (*get_version_)(int*) = nullptr;
  int (*start_)() = nullptr;
  int (*end_)() = nullptr;
  int (*broadcast_)(const void*, void*, size_t, int, int, void*, cudaStream_t) = nullptr;
  void* comms_[8] = {};
  bool is_loaded_ = false;
  int version_ = 0;
};

// bf16 products on one device, as the dense layers of a model run them.
class Cublas {
 public:
  Cublas() {
    void* library =
        open_library("ISER_CUBLAS_LIBRARY", {"libcublas.so.13", "libcublas.so.12", "libcublas.so"});
    is_loaded_ = bind(library, "cublasCreate_v2", create_) &&
                 bind(library, "cublasSetStream_v2", set_stream_) &&
                 bind(library, "cublasSetWorkspace_v2", set_workspace_) &&
                 bind(library, "cublasSetSmCountTarget", set_sms_) &&
                 bind(library, "cublasGemmEx", gemm_) &&
                 bind(library, "cublasGetVersion_v2", get_version_);
  }

  bool init(cudaStream_t stream) {
    constexpr size_t kWorkspace = 64 << 20;
    if (!is_loaded_ || create_(&handle_) != 0) return false;
    void* workspace = nullptr;
    get_version_(handle_, &version_);
    return cudaMalloc(&workspace, kWorkspace) == cudaSuccess && set_stream_(handle_, stream) == 0 &&
           set_workspace_(handle_, workspace, kWorkspace) == 0;
  }
  int version() const { return version_; }
  bool use_sms(int count) { return set_sms_(handle_, count) == 0; }  // 0: all

  // Row-major c[m, n] = a[m, k] b[n, k]^T.
  bool gemm(const void* a, const void* b, void* c, int m, int n, int k) {
    constexpr int kBf16 = 14, kCompute32F = 68, kDefault = -1, kTranspose = 1, kPlain = 0;
    const float one = 1, zero = 0;
    return gemm_(handle_, kTranspose, kPlain, n, m, k, &one, b, kBf16, k, a, kBf16, k, &zero, c,
                 kBf16, n, kCompute32F, kDefault) == 0;
  }

 private:
  int (*create_)(void**) = nullptr;
  int (*set_stream_)(void*, cudaStream_t) = nullptr;
  int (*set_workspace_)(void*, void*, size_t) = nullptr;
  int (*set_sms_)(void*, int) = nullptr;
  int (*get_version_)(void*, int*) = nullptr;
  int (*gemm_)(void*, int, int, int, int, int, const void*, const void*, int, int, const void*, int,
               int, const void*, void*, int, int, int, int) = nullptr;
  void* handle_ = nullptr;
  bool is_loaded_ = false;
  int version_ = 0;
};

}  // namespace bench
