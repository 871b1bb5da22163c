// Enough of CUDA and of a Hopper SM to run whole kernels on a CPU, a fiber for each thread and a
// CPU thread for each of a few resident CTAs, and for each stream. Tensor copies land some time
// after they are issued, and wgmma reads its operands when somebody waits for it, so that an early
// release of a buffer is found out. Not modelled: memory order, proxies, register counts.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#define ISER_SIMT 1
#define __CUDACC__ 1
#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};
inline thread_local dim3 threadIdx, blockDim, blockIdx, gridDim;

namespace simt {

constexpr size_t kStackBytes = 96 << 10, kSharedBytes = 227 << 10;
constexpr uint32_t kStaticBase = 1u << 24;  // addresses of shared memory that is not dynamic
constexpr unsigned kResidentCtas = 6;

// Begins by its context and goes on by jumps, which leave the signal mask, a system call, alone.
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  bool has_begun = false;
  std::unique_ptr<char[]> stack{new char[kStackBytes]};
  bool is_done = false;
};

struct Meeting {
  uint32_t arrived = 0, generation = 0;
};

struct Barrier {
  uint32_t count = 0, pending = 0, parity = 0;
  int64_t bytes = 0;

  void settle() {
    if (pending != 0 || bytes != 0) return;
    parity ^= 1;
    pending = count;
  }
};

// 64 rows, `columns` and 32 bytes of K.
struct MmaShape {
  int columns, depth;
  bool is_fp8;

  int num_acc() const { return columns / 2; }
};
constexpr int kMostColumns = 192, kMostDepth = 32;

struct Mma {
  MmaShape shape;
  std::vector<float*> accumulators;  // [128 * num_acc]
  uint64_t a, b;
  bool adds;
};

struct WarpGroup {
  std::vector<float*> accumulators;  // of the product that is being issued
  std::vector<Mma> open;
  std::deque<std::vector<Mma>> groups;
  Meeting meeting;
};

constexpr uint32_t kPeerBase = 1u << 28;  // shared addresses of the cluster's CTAs lie this apart

// A CTA; one CPU thread runs it, and the other CTAs of its cluster.
struct Cta {
  std::vector<std::unique_ptr<Cta>>* cluster = nullptr;
  unsigned rank = 0;  // in the cluster
  dim3 index;
  std::unique_ptr<uint8_t[]> memory;
  Meeting* cluster_meeting = nullptr;
  std::vector<Fiber> fibers;
  std::vector<Meeting> warps;
  std::vector<uint64_t> values, snapshots;
  std::vector<uint64_t> stores;  // addresses and words of stmatrix
  Meeting block, named[16];
  std::unordered_map<uint32_t, Barrier> barriers;
  std::vector<WarpGroup> groups;
  std::vector<std::function<void()>> landing;  // tensor copies under way
  std::vector<void*> statics;
  uint8_t* shared = nullptr;
  unsigned current = 0, idle = 0;
};

inline thread_local Cta* cta = nullptr;
inline thread_local jmp_buf scheduler;

inline void enter(Cta* of, unsigned thread) {
  cta = of;
  cta->current = thread;
  threadIdx.x = thread;
  blockIdx = of->index;
}

inline void yield() {
  Cta* const own = cta;
  const unsigned self = own->current;
  if (_setjmp(own->fibers[self].place) == 0) _longjmp(scheduler, 1);
  enter(own, self);
}

// Until it yields or ends.
inline void resume(Fiber& fiber) {
  if (_setjmp(scheduler) != 0) return;
  if (fiber.has_begun) _longjmp(fiber.place, 1);
  fiber.has_begun = true;
  setcontext(&fiber.context);
}

inline void meet(Meeting& meeting, uint32_t count) {
  const uint32_t generation = meeting.generation;
  if (++meeting.arrived == count) {
    meeting.arrived = 0;
    ++meeting.generation;
    cta->idle = 0;
    return;
  }
  while (meeting.generation == generation) yield();
}

inline Meeting& own_warp() { return cta->warps[threadIdx.x / 32]; }

inline const uint64_t* exchange(uint64_t value) {
  Cta& c = *cta;
  const unsigned self = c.current, warp = self / 32;
  const uint32_t lanes = std::min(32u, blockDim.x - 32 * warp);
  c.values[self] = value;
  meet(c.warps[warp], lanes);
  std::copy_n(&c.values[warp * 32], lanes, &c.snapshots[self * 32]);
  meet(c.warps[warp], lanes);
  return &c.snapshots[self * 32];
}

inline uint8_t* dynamic_shared() { return cta->shared; }

inline uint32_t to_shared(const void* pointer) {
  const uint8_t* bytes = static_cast<const uint8_t*>(pointer);
  if (bytes >= cta->shared && bytes < cta->shared + kSharedBytes) {
    return static_cast<uint32_t>(bytes - cta->shared) + 128;  // a base that is not a multiple
  }
  for (size_t i = 0; i < cta->statics.size(); ++i) {
    if (cta->statics[i] == pointer) return kStaticBase + static_cast<uint32_t>(i) * 1024;
  }
  cta->statics.push_back(const_cast<void*>(pointer));
  return to_shared(pointer);
}

inline Cta& cta_of(uint32_t address) {
  return address < kPeerBase ? *cta : *cta->cluster->at(address / kPeerBase - 1);
}

inline uint8_t* from_shared(uint32_t address) {
  if (address >= kPeerBase) {
    Cta& peer = cta_of(address);
    return peer.shared + address % kPeerBase - 128;
  }
  if (address >= kStaticBase) {
    return static_cast<uint8_t*>(cta->statics[(address - kStaticBase) / 1024]);
  }
  if (address < 128 || address >= kSharedBytes + 128) {
    std::fprintf(stderr, "simt: shared address %u\n", address);
    std::abort();
  }
  return cta->shared + address - 128;
}

// Makes the fibers of a CTA.
inline void prepare_cta(Cta& c, unsigned threads) {
  c.fibers = std::vector<Fiber>(threads);
  c.warps.assign((threads + 31) / 32, {});
  c.values.assign((threads + 31) / 32 * 32, 0);
  c.snapshots.assign(static_cast<size_t>(threads + 31) / 32 * 32 * 32, 0);
  c.stores.assign(threads * 5, 0);
  c.groups = std::vector<WarpGroup>((threads + 127) / 128);
  c.memory.reset(new uint8_t[kSharedBytes + 2048]);
  c.shared = c.memory.get() + (1024 - reinterpret_cast<uintptr_t>(c.memory.get()) % 1024) % 1024;
  std::memset(c.shared, 0xcd, kSharedBytes);
}

inline thread_local const std::function<void()>* entry;

inline void run_fiber() {
  (*entry)();
  Cta* const own = cta;
  own->fibers[own->current].is_done = true;
  _longjmp(scheduler, 1);
}

inline void start_fibers(Cta& c) {
  for (Fiber& fiber : c.fibers) {
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.get();
    fiber.context.uc_stack.ss_size = kStackBytes;
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, run_fiber, 0);
  }
}

// Lets one warp get on; returns how many of its threads have ended.
inline unsigned run_warp(Cta& c, unsigned warp) {
  unsigned ended = 0;
  const unsigned end = std::min<unsigned>(c.fibers.size(), warp * 32 + 32);
  for (unsigned i = warp * 32; i < end; ++i) {
    if (c.fibers[i].is_done) continue;
    enter(&c, i);
    resume(c.fibers[i]);
    ended += c.fibers[i].is_done;
  }
  return ended;
}

inline void land_one(Cta& c, std::mt19937& rng) {
  const size_t which = rng() % c.landing.size();
  const auto land = std::move(c.landing[which]);
  c.landing.erase(c.landing.begin() + which);
  cta = &c;
  land();
}

// Time is CPU time: a machine that is busy with other things changes no outcome.
inline int64_t cpu_ns(clockid_t clock) {
  timespec now{};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000ll + now.tv_nsec;
}

// Runs the CTAs of a cluster to their ends.
inline void run_cluster(std::vector<std::unique_ptr<Cta>>& ctas, unsigned threads,
                        const std::function<void()>& kernel, std::mt19937& rng) {
  entry = &kernel;
  for (auto& c : ctas) start_fibers(*c);
  const unsigned warps = (threads + 31) / 32;
  const int64_t begin = cpu_ns(CLOCK_THREAD_CPUTIME_ID);
  for (unsigned left = threads * ctas.size(), turn = 0; left > 0; ++turn) {
    Cta& c = *ctas[rng() % ctas.size()];
    left -= run_warp(c, rng() % warps);
    if (!c.landing.empty() && rng() % 4 == 0) land_one(c, rng);
    if (turn % 4096 == 0 && cpu_ns(CLOCK_THREAD_CPUTIME_ID) - begin > 60'000'000'000) {
      std::fprintf(stderr, "simt: a CTA has run for a minute; its threads wait for ever\n");
      std::abort();
    }
    if (turn % 64 == 0) std::this_thread::yield();
  }
  for (const auto& c : ctas) {
    if (c->landing.empty()) continue;
    std::fprintf(stderr, "simt: a CTA ended before its tensor copies\n");
    std::abort();
  }
}

// Runs what it is given in order, on a thread of its own.
class Stream {
 public:
  Stream() : thread_([this] { work(); }) {}
  ~Stream() {
    push(nullptr);
    thread_.join();
  }
  void push(std::function<void()> task) {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    changed_.notify_all();
  }
  void synchronize() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return tasks_.empty(); });
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !tasks_.empty(); });
      const std::function<void()> task = tasks_.front();
      if (!task) return;
      lock.unlock();
      task();
      lock.lock();
      tasks_.pop_front();
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;
};

// SMs that CTAs with most of the shared memory fill: as many as ISER_SIMT_SMS says, else enough.
inline unsigned num_sms() {
  const char* text = std::getenv("ISER_SIMT_SMS");
  return text == nullptr ? 0 : std::atoi(text);
}

class Sms {
 public:
  void take(unsigned count) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return free_ >= count; });
    free_ -= count;
  }
  void give(unsigned count) {
    std::lock_guard lock(mutex_);
    free_ += count;
    changed_.notify_all();
  }

 private:
  unsigned free_ = num_sms();
  std::mutex mutex_;
  std::condition_variable changed_;
};
inline Sms sms;

struct Launch {
  dim3 grid, block;
  size_t shared;
  Stream* stream;
  unsigned cluster = 1;  // CTAs side by side in y

  Launch(dim3 g, dim3 b, size_t bytes = 0, Stream* s = nullptr)
      : grid(g), block(b), shared(bytes), stream(s) {}

  std::vector<std::unique_ptr<Cta>> make_cluster(unsigned index, Meeting& meeting) const {
    std::vector<std::unique_ptr<Cta>> ctas;
    for (unsigned r = 0; r < cluster; ++r) {
      ctas.push_back(std::make_unique<Cta>());
      prepare_cta(*ctas[r], block.x);
      ctas[r]->rank = r;
      ctas[r]->index = dim3(index % grid.x, index / grid.x * cluster + r, 0);
      ctas[r]->cluster_meeting = &meeting;
    }
    return ctas;
  }

  template <class Kernel, class... Args>
  void run(Kernel kernel, const Args&... args) const {
    const std::function<void()> task = [launch = *this, kernel, args...] {
      launch.run_now(kernel, args...);
    };
    stream == nullptr ? task() : stream->push(task);
  }

  template <class Kernel, class... Args>
  void run_now(Kernel kernel, const Args&... args) const {
    unsigned next = 0;
    std::mutex mutex;  // CTAs begin in order
    const unsigned total = grid.x * grid.y / cluster;
    const unsigned sms_each = num_sms() > 0 && shared > kSharedBytes / 2 ? cluster : 0;
    const auto begin_next = [&] {
      std::lock_guard lock(mutex);
      if (next < total) sms.take(sms_each);
      return next++;
    };
    const auto worker = [&](unsigned seed) {
      std::mt19937 rng(seed + 7);
      gridDim = grid;
      blockDim = block;
      for (unsigned i; (i = begin_next()) < total;) {
        Meeting meeting;
        auto ctas = make_cluster(i, meeting);
        for (auto& c : ctas) c->cluster = &ctas;
        run_cluster(ctas, block.x, [&] { kernel(args...); }, rng);
        sms.give(sms_each);
      }
      cta = nullptr;
    };
    std::vector<std::thread> workers;
    const unsigned resident = std::max(kResidentCtas, num_sms());
    for (unsigned i = 0; i < std::min(total, resident); ++i) workers.emplace_back(worker, i);
    for (std::thread& thread : workers) thread.join();
  }

  template <class Kernel, class... Args>
  void run_plain(Kernel kernel, const Args&... args) const {
    gridDim = grid;
    blockDim = block;
    for (unsigned i = 0; i < grid.x; ++i) {
      blockIdx = dim3(i, 0, 0);
      for (threadIdx.x = 0; threadIdx.x < block.x; ++threadIdx.x) kernel(args...);
    }
  }
};

}  // namespace simt

inline void __syncthreads() {
  simt::cta->idle = 0;
  unsigned alive = 0;
  for (const auto& fiber : simt::cta->fibers) alive += !fiber.is_done;
  simt::meet(simt::cta->block, alive);
}
inline void __syncwarp() { simt::exchange(0); }
inline void __threadfence_system() { std::atomic_thread_fence(std::memory_order_seq_cst); }

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const uint64_t got = simt::exchange(bits)[source];
  T result;
  std::memcpy(&result, &got, sizeof(T));
  return result;
}
template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int mask) {
  return __shfl_sync(lanes, value, static_cast<int>(threadIdx.x % 32) ^ mask);
}
inline unsigned __ballot_sync(unsigned, bool holds) {
  const uint64_t* all = simt::exchange(holds);
  unsigned ballot = 0;
  for (int i = 0; i < 32; ++i) ballot |= static_cast<unsigned>(all[i]) << i;
  return ballot;
}
inline int __popc(unsigned value) { return __builtin_popcount(value); }
template <typename T>
T __ldcg(const T* from) {
  return *from;
}
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __expf(float a) { return std::exp(a); }
inline float __uint_as_float(unsigned bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
inline unsigned __float_as_uint(float value) {
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline uint64_t __cvta_generic_to_shared(const void* pointer) { return simt::to_shared(pointer); }
inline uint64_t __cvta_generic_to_global(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
inline int64_t clock64() { return simt::cpu_ns(CLOCK_PROCESS_CPUTIME_ID); }
template <typename T>
T atomicAdd(T* to, T value) {
  return __atomic_fetch_add(to, value, __ATOMIC_SEQ_CST);
}
template <typename T>
T atomicCAS(T* to, T expected, T value) {
  __atomic_compare_exchange_n(to, &expected, value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
  return expected;
}
template <typename T>
T atomicCAS_system(T* to, T expected, T value) {
  return atomicCAS(to, expected, value);
}
template <typename T>
T atomicMax(T* to, T value) {
  T seen = __atomic_load_n(to, __ATOMIC_SEQ_CST);
  while (seen < value && !__atomic_compare_exchange_n(to, &seen, value, false, __ATOMIC_SEQ_CST,
                                                      __ATOMIC_SEQ_CST)) {
  }
  return seen;
}

#include "ptx.h"
#include "runtime.h"
