// Faults that a sanitizer has to report, so that its silence on the rest means something.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstdio>
#include <string>

#include "ffi/cuda/bulk_copy.cuh"

namespace iser::cuda {

static __global__ void planted_overrun(uint32_t* words) { words[(1 << 20) + threadIdx.x] = 1; }

static __global__ void planted_race(uint32_t* words) {
  __shared__ uint32_t own[64];
  own[threadIdx.x] = words[threadIdx.x];  // the barrier that is missing is the fault
  words[threadIdx.x] = own[threadIdx.x ^ 32];
}

static __global__ void planted_uninitialized(uint32_t* words) { words[threadIdx.x] += 1; }

// Half of a warp leaves the other alone at the barrier.
static __global__ void planted_divergence(uint32_t* words) {
  if (threadIdx.x % 32 < 16) {
    words[threadIdx.x] = 1;
    __syncthreads();
  }
  words[threadIdx.x] = 2;
}

// A ring of words as the tensor engine hands over its tiles: one thread writes and arrives, two
// warps read and arrive, a third has read too and gives the place back. With a fault the writer
// arrives before it writes. Only lanes that arrive read: racecheck does not follow another lane's
// read to the arrival behind a __syncwarp, and reports it.
constexpr int kRingPlaces = 4, kRingRounds = 4, kRingReaders = 2;

template <bool kHasFault>
static __global__ void planted_ring(uint32_t* words) {
  __shared__ uint32_t ring[kRingPlaces];
  __shared__ uint64_t full[kRingPlaces], read[kRingPlaces], empty[kRingPlaces];
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingPlaces; ++i) {
      mbarrier_init(&full[i], 1);
      mbarrier_init(&read[i], kRingReaders);
      mbarrier_init(&empty[i], 1);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  uint32_t sum = 0;
  for (uint32_t i = 0; i < kRingPlaces * kRingRounds; ++i) {
    const uint32_t at = i % kRingPlaces, parity = i / kRingPlaces & 1;
    if (warp == 0) {
      if (lane != 0) continue;
      mbarrier_wait(&empty[at], parity ^ 1);
      if (kHasFault) mbarrier_arrive(&full[at]);
      ring[at] = i;
      if (!kHasFault) mbarrier_arrive(&full[at]);
      continue;
    }
    mbarrier_wait(&full[at], parity);
    if (lane == 0) sum += ring[at];
    if (warp > kRingReaders) mbarrier_wait(&read[at], parity);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(warp > kRingReaders ? &empty[at] : &read[at]);
  }
  words[threadIdx.x] = sum;
}

// What is named: a tool's fault, "ring" (racecheck's too) or "no fault", the same ring without one.
// The program's exit code, which is the tool's to change.
inline int plant(const std::string& name) {
  constexpr int kRingThreads = 32 * (kRingReaders + 2);
  uint32_t* words = nullptr;
  if (cudaMalloc(&words, 4096) != cudaSuccess) return 2;
  if (name == "memcheck") planted_overrun<<<1, 64>>>(words);
  if (name == "racecheck") planted_race<<<1, 64>>>(words);
  if (name == "initcheck") planted_uninitialized<<<1, 64>>>(words);
  if (name == "synccheck") planted_divergence<<<1, 64>>>(words);
  if (name == "ring") planted_ring<true><<<1, kRingThreads>>>(words);
  if (name == "no fault") planted_ring<false><<<1, kRingThreads>>>(words);
  std::printf("planted %s: %s\n", name.c_str(), cudaGetErrorString(cudaDeviceSynchronize()));
  return 0;
}

}  // namespace iser::cuda
