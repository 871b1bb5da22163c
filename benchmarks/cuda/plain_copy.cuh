// The copy that ordinary loads and stores make: what the bulk-copy engine is measured against.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

namespace bench {

// 16-byte accesses, `kUnroll` loads in flight a thread. `count` is in 16-byte words.
template <int kUnroll>
__global__ void __launch_bounds__(1024)
    plain_copy_kernel(uint4* __restrict__ to, const uint4* __restrict__ from, size_t count) {
  const size_t threads = static_cast<size_t>(gridDim.x) * blockDim.x;
  size_t at = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; at + (kUnroll - 1) * threads < count; at += kUnroll * threads) {
    uint4 words[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) words[i] = __ldcs(from + at + i * threads);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) __stcs(to + at + i * threads, words[i]);
  }
  for (; at < count; at += threads) to[at] = from[at];
}

inline void plain_copy(void* to, const void* from, size_t bytes, int ctas, int unroll,
                       cudaStream_t stream) {
  auto* target = static_cast<uint4*>(to);
  auto* source = static_cast<const uint4*>(from);
  const size_t count = bytes / sizeof(uint4);
  if (unroll == 4) {
    plain_copy_kernel<4><<<ctas, 1024, 0, stream>>>(target, source, count);
  } else {
    plain_copy_kernel<8><<<ctas, 1024, 0, stream>>>(target, source, count);
  }
}

}  // namespace bench
