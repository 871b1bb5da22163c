// The process's tile workers: one thread a core, shared by all ranks and Domains.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

namespace iser::cpu {

// Tasks 0 .. count-1, claimed in order; those from `open` on wait for open_all().
class Batch {
 public:
  Batch(size_t count, size_t open, std::function<void(size_t)> task)
      : count_(count), open_(open), unfinished_(count), task_(std::move(task)) {}

 private:
  friend class Pool;
  const size_t count_;
  size_t open_;
  size_t next_ = 0;
  size_t unfinished_;
  const std::function<void(size_t)> task_;
};

class Pool {
 public:
  // The one pool; its threads start at first use and live as long as the process.
  // ISER_NUM_THREADS overrides the number of cores this process may run on.
  static Pool& shared();

  std::shared_ptr<Batch> submit(size_t count, size_t open, std::function<void(size_t)> task);
  void open_all(Batch& batch);
  // Drops the tasks that nobody has begun: after it, wait() waits for running ones only.
  void cancel(Batch& batch);
  void wait(Batch& batch);
  // submit and wait.
  void run(size_t count, std::function<void(size_t)> task);

  int num_threads() const { return num_threads_; }

 private:
  explicit Pool(int num_threads);
  void work();
  std::shared_ptr<Batch> claim(std::unique_lock<std::mutex>& lock, size_t* index);

  const int num_threads_;
  std::mutex mutex_;
  std::condition_variable has_work_, has_finished_;
  std::list<std::shared_ptr<Batch>> batches_;  // with tasks left to claim
};

}  // namespace iser::cpu
