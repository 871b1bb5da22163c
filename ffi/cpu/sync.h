// Words in shared memory: acquire and release, and sleeping until one changes.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cstdint>

namespace iser::cpu {

inline uint32_t load_acquire(const uint32_t* word) {
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}
inline void store_release(uint32_t* word, uint32_t value) {
  __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
// Returns the new value. Release pairs with the acquire of whoever sees the count complete.
inline uint32_t add_release(uint32_t* word, uint32_t value) {
  return __atomic_add_fetch(word, value, __ATOMIC_ACQ_REL);
}

// Sleeps until the word is woken, no longer holds `seen`, or `nanoseconds` passed. Works across
// processes.
inline void sleep_on(const uint32_t* word, uint32_t seen, int64_t nanoseconds) {
  const timespec limit{static_cast<time_t>(nanoseconds / 1'000'000'000),
                       static_cast<long>(nanoseconds % 1'000'000'000)};
  syscall(SYS_futex, word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

inline void wake_all(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

inline int64_t clock_ns(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return now.tv_sec * int64_t{1'000'000'000} + now.tv_nsec;
}
inline int64_t now_ns() { return clock_ns(CLOCK_MONOTONIC); }
inline int64_t thread_cpu_ns() { return clock_ns(CLOCK_THREAD_CPUTIME_ID); }

}  // namespace iser::cpu
