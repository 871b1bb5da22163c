// The two threads of a device and the life of an invocation.
#include <cmath>
#include <cstring>

#include "ffi/cpu/domain.h"

namespace iser::cpu {

Device::Device(Domain& domain, int32_t rank)
    : first_rank(rank),
      domain_(domain),
      last_finished_(domain.options.first_generation - 1),
      copy_thread_([this] { copy_loop(); }),
      main_thread_([this] { main_loop(); }) {}

Device::~Device() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  copy_thread_.join();
  {
    std::lock_guard lock(mutex_);
    copy_ended_ = true;  // only now: COPY hands its last calls to MAIN to complete
  }
  changed_.notify_all();
  main_thread_.join();
}

uint32_t Device::start(const CallKey& key, const StartCall& call,
                       const PlanOutputs& plan_only_outputs, Done plan_only_done) {
  auto invocation = std::make_shared<Invocation>();
  const uint64_t serial = domain_.serial_of(key, first_rank);
  invocation->generation = domain_.options.first_generation + static_cast<uint32_t>(serial);
  invocation->is_first = serial == 0;
  invocation->call = call;
  invocation->times.started = now_ns();
  const size_t routes = static_cast<size_t>(domain_.options.ranks_per_device) * call.num_tokens *
                        domain_.shape().top_k;
  invocation->topk_ids.assign(call.topk_ids, call.topk_ids + routes);
  invocation->route_slot.resize(routes);
  invocation->plan_only_outputs = plan_only_outputs;
  invocation->plan_only_done = std::move(plan_only_done);
  {
    std::lock_guard lock(mutex_);
    copy_queue_[invocation->generation] = invocation;
    in_flight_[invocation->generation] = invocation;
  }
  changed_.notify_all();
  return invocation->generation;
}

std::shared_ptr<Invocation> Device::find(uint32_t generation) {
  std::lock_guard lock(mutex_);
  const auto found = in_flight_.find(generation);
  return found == in_flight_.end() ? nullptr : found->second;
}

void Device::fused_moe(uint32_t generation, FusedCall call) {
  {
    std::lock_guard lock(mutex_);
    const auto& invocation = in_flight_.at(generation);
    invocation->times.fused_called = now_ns();
    main_queue_[generation] = {invocation, std::move(call)};
  }
  changed_.notify_all();
}

std::shared_ptr<Invocation> Device::oldest() {
  std::lock_guard lock(mutex_);
  return in_flight_.empty() ? nullptr : in_flight_.begin()->second;
}

// Takes invocations in the order of their generations: a device whose programs came in another
// order than elsewhere waits for the one that is due. A failed Domain serves whatever there is.
void Device::copy_loop() {
  uint32_t next = domain_.options.first_generation;
  for (;;) {
    std::shared_ptr<Invocation> invocation;
    {
      std::unique_lock lock(mutex_);
      while (!closing_ && !copy_queue_.count(next) &&
             !(domain_.has_failed() && !copy_queue_.empty())) {
        changed_.wait_for(lock, std::chrono::milliseconds(copy_queue_.empty() ? 1000 : 50));
      }
      if (copy_queue_.empty()) return;
      if (closing_ && !copy_queue_.count(next) && !domain_.has_failed()) return;
      const auto first = copy_queue_.begin();
      invocation = first->second;
      next = first->first + 1;
      copy_queue_.erase(first);
    }
    run_copy(*invocation);
    store_release(&invocation->is_planned, 1);
    wake_all(&invocation->is_planned);
    if (invocation->call.is_plan_only) {
      // MAIN completes the call: whatever runs behind it must not hold up the next plan.
      std::lock_guard lock(mutex_);
      main_queue_[invocation->generation] = {invocation, {}};
      changed_.notify_all();
    }
  }
}

bool Device::is_turn(const Invocation& invocation) const {
  return has_reached(last_finished_, invocation.generation - 1);
}

// The previous invocation must have left this device: its send lists and counts are reused.
bool Device::wait_turn(const Invocation& invocation) {
  const int64_t deadline = domain_.deadline_for(invocation);
  std::unique_lock lock(mutex_);
  while (!is_turn(invocation) && !closing_) {
    // A call whose fused_moe never comes, because its program failed in between, ends here.
    if (!domain_.keep_waiting({Stage::kCombine, first_rank}, first_rank, invocation, deadline))
      break;
    changed_.wait_for(lock, std::chrono::milliseconds(100));
  }
  return is_turn(invocation) && !closing_ && !domain_.has_failed();
}

void Device::run_copy(Invocation& invocation) {
  if (!wait_turn(invocation)) return;
  const int32_t ranks = domain_.options.ranks_per_device;
  for (int32_t v = 0; v < ranks; ++v) publish_counts(domain_, invocation, first_rank + v, v);
  invocation.plan = domain_.plan_for(invocation, first_rank);
  if (!invocation.plan) return;
  for (int32_t v = 0; v < ranks; ++v) rewrite_routes(domain_, invocation, first_rank + v, v);
  invocation.times.planned = now_ns();
  if (invocation.call.is_plan_only) {
    for (int32_t v = 0; v < ranks; ++v) {
      for (Stage stage : {Stage::kStaged, Stage::kDispatch, Stage::kReady}) {
        domain_.arrive(stage, first_rank + v, invocation.generation);
      }
    }
    return;
  }
  store_release(&invocation.is_planned, 1);
  wake_all(&invocation.is_planned);
  invocation.times.copy_begin = now_ns();
  for (int32_t v = 0; v < ranks; ++v) {
    if (!stage_bundles(domain_, invocation, first_rank + v)) return;
  }
  for (int32_t v = 0; v < ranks; ++v) {
    if (!replicate(domain_, invocation, first_rank + v)) return;
  }
  invocation.times.copy_end = now_ns();  // from READY on, MAIN may finish and read the times
  for (int32_t v = 0; v < ranks; ++v) publish_ready(domain_, invocation, first_rank + v);
}

// Likewise in the order of generations: calls that do not depend on each other may be completed in
// another order than they were started in.
void Device::main_loop() {
  for (;;) {
    MainJob job;
    {
      std::unique_lock lock(mutex_);
      const auto is_due = [&] {
        return !main_queue_.empty() && (closing_ || domain_.has_failed() ||
                                        is_turn(*main_queue_.begin()->second.invocation));
      };
      while (!is_due() && !copy_ended_) {
        changed_.wait_for(lock, std::chrono::milliseconds(main_queue_.empty() ? 1000 : 50));
      }
      if (main_queue_.empty()) return;
      job = std::move(main_queue_.begin()->second);
      main_queue_.erase(main_queue_.begin());
    }
    run_main(job);
  }
}

void Device::run_main(MainJob& job) {
  Invocation& invocation = *job.invocation;
  const bool is_plan_only = invocation.call.is_plan_only;
  bool ok = domain_.wait_planned(invocation);
  if (!is_plan_only) ok = iser::cpu::fused_moe(domain_, invocation, job.call, first_rank);
  write_plan_outputs(domain_, invocation,
                     is_plan_only ? invocation.plan_only_outputs : job.call.plan, ok);
  invocation.times.generation = invocation.generation;
  invocation.times.layer = invocation.call.layer;
  invocation.times.finished = now_ns();
  if (ok && !is_plan_only) domain_.record(invocation.times, first_rank);
  if (!ok) domain_.wait_readers();
  const std::string error = ok ? "" : domain_.error_text();
  const Done done = is_plan_only ? invocation.plan_only_done : job.call.done;
  finish(job.invocation);
  done(error);  // runs what follows in the program: nothing of the Domain's may be held here
}

void Device::finish(const std::shared_ptr<Invocation>& invocation) {
  {
    std::lock_guard lock(mutex_);
    last_finished_ = invocation->generation;
    in_flight_.erase(invocation->generation);
  }
  changed_.notify_all();
}

}  // namespace iser::cpu
