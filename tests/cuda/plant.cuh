// Faults that a sanitizer has to report, so that its silence on the rest means something.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string>

namespace iser::cuda {

static __global__ void planted_overrun(uint32_t* words) { words[(1 << 20) + threadIdx.x] = 1; }

static __global__ void planted_race(uint32_t* words) {
  __shared__ uint32_t word;
  word = threadIdx.x;  // the barrier that is missing is the fault
  words[threadIdx.x] = word;
}

// The one for the named tool; the program's exit code, which is the tool's to change.
inline int plant(const std::string& tool) {
  uint32_t* words = nullptr;
  if (cudaMalloc(&words, 4096) != cudaSuccess) return 2;
  if (tool == "memcheck") planted_overrun<<<1, 64>>>(words);
  if (tool == "racecheck") planted_race<<<1, 64>>>(words);
  std::printf("planted a fault for %s: %s\n", tool.c_str(),
              cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}

}  // namespace iser::cuda
