#include "ffi/cpu/pool.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>

namespace iser::cpu {
namespace {

int default_threads() {
  if (const char* text = std::getenv("ISER_NUM_THREADS")) {
    char* end = nullptr;
    const long threads = std::strtol(text, &end, 10);
    if (end != text && *end == '\0' && 1 <= threads && threads <= 4096) {
      return static_cast<int>(threads);
    }
    throw std::invalid_argument("ISER_NUM_THREADS=" + std::string(text) +
                                " is not a number from 1 to 4096; unset it to use every core");
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return std::max(1u, std::thread::hardware_concurrency());
}

}  // namespace

Pool& Pool::shared() {
  static Pool* const pool = new Pool(default_threads());  // never destroyed: threads outlive main()
  return *pool;
}

Pool::Pool(int num_threads) : num_threads_(num_threads) {
  for (int i = 0; i < num_threads_; ++i) std::thread([this] { work(); }).detach();
}

std::shared_ptr<Batch> Pool::submit(size_t count, size_t open, std::function<void(size_t)> task) {
  auto batch = std::make_shared<Batch>(count, open, std::move(task));
  if (count > 0) {
    std::lock_guard lock(mutex_);
    batches_.push_back(batch);
  }
  has_work_.notify_all();
  return batch;
}

void Pool::open_all(Batch& batch) {
  {
    std::lock_guard lock(mutex_);
    batch.open_ = batch.count_;
  }
  has_work_.notify_all();
}

void Pool::cancel(Batch& batch) {
  {
    std::lock_guard lock(mutex_);
    batch.unfinished_ -= batch.count_ - batch.next_;
    batch.next_ = batch.count_;
    batches_.remove_if([&](const auto& other) { return other.get() == &batch; });
  }
  has_finished_.notify_all();
}

void Pool::wait(Batch& batch) {
  std::unique_lock lock(mutex_);
  has_finished_.wait(lock, [&] { return batch.unfinished_ == 0; });
}

void Pool::run(size_t count, std::function<void(size_t)> task) {
  wait(*submit(count, count, std::move(task)));
}

// Takes the next task of the batch that has waited longest among those with an open one, and moves
// that batch behind the others, so that ranks advance together.
std::shared_ptr<Batch> Pool::claim(std::unique_lock<std::mutex>& lock, size_t* index) {
  for (;;) {
    for (auto it = batches_.begin(); it != batches_.end(); ++it) {
      std::shared_ptr<Batch> batch = *it;
      if (batch->next_ >= batch->open_) continue;
      *index = batch->next_++;
      batches_.erase(it);
      if (batch->next_ < batch->count_) batches_.push_back(batch);
      return batch;
    }
    has_work_.wait(lock);
  }
}

void Pool::work() {
  std::unique_lock lock(mutex_);
  for (;;) {
    size_t index;
    const std::shared_ptr<Batch> batch = claim(lock, &index);
    lock.unlock();
    batch->task_(index);
    lock.lock();
    if (--batch->unfinished_ == 0) has_finished_.notify_all();
  }
}

}  // namespace iser::cpu
