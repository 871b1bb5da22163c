// Enough of CUDA to run one CTA's code on a CPU, a fiber for each thread, so that kernels' logic
// can be tested, and looked at by sanitizers, where there is no GPU. Warp operations take full
// warps.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#define ISER_SIMT 1
#define __device__
#define __host__
#define __global__
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))

using cudaError_t = int;
using cudaStream_t = void*;
using std::max;
using std::min;

struct Dim3 {
  unsigned x = 0, y = 0, z = 0;
};
inline Dim3 threadIdx, blockDim, blockIdx, gridDim;

namespace simt {

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool is_done = false;
};

struct Meeting {
  uint32_t arrived = 0, generation = 0;
};

inline std::vector<std::unique_ptr<Fiber>> fibers;
inline ucontext_t scheduler;
inline unsigned current = 0;
inline std::vector<Meeting> warp_meetings;
inline std::vector<uint64_t> warp_values, warp_snapshot;
inline Meeting block_meeting, named_meeting;
inline uint64_t progress = 0;  // meetings that have come about, and threads that have ended

inline void yield() {
  const unsigned self = current;
  swapcontext(&fibers[self]->context, &scheduler);
  current = self;
  threadIdx.x = self;
}

inline void meet(Meeting& meeting, uint32_t count) {
  const uint32_t generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    ++progress;
    return;
  }
  while (meeting.generation == generation) yield();
}

// Every lane's value, once all 32 have come. Two meetings: nobody overwrites what another reads.
inline const uint64_t* exchange(uint64_t value) {
  const unsigned warp = current / 32;
  warp_values[current] = value;
  meet(warp_meetings[warp], 32);
  std::copy_n(&warp_values[warp * 32], 32, &warp_snapshot[current * 32]);
  meet(warp_meetings[warp], 32);
  return &warp_snapshot[current * 32];
}

inline void named_barrier(uint32_t count) { meet(named_meeting, count); }

inline std::function<void()>* body = nullptr;

inline void enter() {
  threadIdx.x = current;
  (*body)();
  fibers[current]->is_done = true;
  swapcontext(&fibers[current]->context, &scheduler);
}

// Runs `kernel` on one CTA of `threads` threads. One warp at a time gets as far as it can alone, or
// a random way of it: code that needs an order which no barrier gives it is soon found out.
inline void run(unsigned threads, std::function<void()> kernel) {
  body = &kernel;
  blockDim.x = threads;
  warp_meetings.assign(threads / 32, {});
  warp_values.assign(threads, 0);
  warp_snapshot.assign(threads * 32, 0);
  block_meeting = named_meeting = {};
  fibers.clear();
  for (unsigned i = 0; i < threads; ++i) {
    fibers.push_back(std::make_unique<Fiber>());
    Fiber& fiber = *fibers.back();
    fiber.stack.resize(96 << 10);
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    fiber.context.uc_link = &scheduler;
    makecontext(&fiber.context, enter, 0);
  }
  static std::mt19937 rng(1);
  const unsigned warps = threads / 32;
  std::vector<unsigned> lanes(32);
  std::iota(lanes.begin(), lanes.end(), 0u);
  for (uint64_t idle = 0, left = threads; left > 0;) {
    const unsigned warp = rng() % warps;
    unsigned rounds = rng() % 4 ? 1u << 30 : 1 + rng() % 64;
    for (uint64_t seen = ~0ull; rounds > 0 && seen != progress; --rounds) {
      seen = progress;
      std::shuffle(lanes.begin(), lanes.end(), rng);
      for (unsigned lane : lanes) {
        const unsigned i = warp * 32 + lane;
        if (fibers[i]->is_done) continue;
        current = threadIdx.x = i;
        swapcontext(&scheduler, &fibers[i]->context);
        if (fibers[i]->is_done) --left, ++progress;
      }
      if (seen != progress) idle = 0;
    }
    if (++idle > 1000 * warps) {
      std::fprintf(stderr, "simt: threads wait for each other for ever\n");
      std::abort();
    }
  }
}

}  // namespace simt

inline void __syncthreads() { simt::meet(simt::block_meeting, blockDim.x); }
inline void __syncwarp() { simt::exchange(0); }

inline int __shfl_sync(unsigned, int value, int source, int width = 32) {
  const int lane = threadIdx.x % 32;
  return static_cast<int>(
      simt::exchange(static_cast<uint32_t>(value))[lane / width * width + (source & (width - 1))]);
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  const int lane = threadIdx.x % 32;
  return static_cast<T>(simt::exchange(static_cast<uint64_t>(value))[lane ^ mask]);
}
inline int __shfl_up_sync(unsigned, int value, int delta, int width = 32) {
  const int lane = threadIdx.x % 32;
  const uint64_t* all = simt::exchange(static_cast<uint32_t>(value));
  return static_cast<int>(all[lane % width >= delta ? lane - delta : lane]);
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  const uint64_t* all = simt::exchange(holds);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(all[i]) << i;
  return ballot;
}
inline bool __any_sync(unsigned, bool holds) { return __ballot_sync(0, holds) != 0; }
template <typename T>
T __reduce_add_sync(unsigned, T value) {
  const uint64_t* all = simt::exchange(static_cast<uint32_t>(value));
  uint32_t sum = 0;
  for (int i = 0; i < 32; ++i) sum += static_cast<uint32_t>(all[i]);
  return static_cast<T>(sum);
}
inline uint32_t __reduce_or_sync(unsigned, uint32_t value) {
  const uint64_t* all = simt::exchange(value);
  uint32_t bits = 0;
  for (int i = 0; i < 32; ++i) bits |= static_cast<uint32_t>(all[i]);
  return bits;
}
template <typename T>
T __reduce_max_sync(unsigned, T value) {
  const uint64_t* all = simt::exchange(static_cast<uint32_t>(value));
  T most = static_cast<T>(all[0]);
  for (int i = 1; i < 32; ++i) most = std::max(most, static_cast<T>(all[i]));
  return most;
}
template <typename T>
T __reduce_min_sync(unsigned, T value) {
  const uint64_t* all = simt::exchange(static_cast<uint32_t>(value));
  T least = static_cast<T>(all[0]);
  for (int i = 1; i < 32; ++i) least = std::min(least, static_cast<T>(all[i]));
  return least;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __clz(int value) { return value == 0 ? 32 : __builtin_clz(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
template <typename T>
T __ldg(const T* from) {
  return *from;
}
template <typename T>
T atomicAdd(T* to, T value) {
  const T before = *to;
  *to += value;
  return before;
}
