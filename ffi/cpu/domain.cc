#include "ffi/cpu/domain.h"

#include <poll.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstring>

#include "ffi/core/error_text.h"

namespace iser::cpu {
namespace {

constexpr int64_t kSliceNs = 100'000'000;  // how long a waiter sleeps between looks around
constexpr size_t kMaxTimelines = 4096;

bool is_gone(int alive_fd) {
  if (alive_fd < 0) return false;
  pollfd poll_fd{alive_fd, POLLRDHUP, 0};
  return poll(&poll_fd, 1, 0) > 0 && (poll_fd.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

}  // namespace

Domain::Domain(DomainOptions domain_options, std::vector<Segment> segments, int32_t local_segment)
    : options(domain_options),
      layout(block_layout(domain_options.shape)),
      busy_ns(static_cast<size_t>(domain_options.num_layers) *
              segments.at(local_segment).num_ranks),
      tile_rows(busy_ns.size()),
      segments_(std::move(segments)),
      local_segment_(local_segment),
      blocks_(domain_options.shape.slots.num_ranks),
      stalls_(segments_[local_segment].num_ranks * static_cast<size_t>(Stage::kNumStages)) {
  for (const Segment& segment : segments_) {
    uint8_t* base = segment.base + align_up(sizeof(ProcessWords), kBlockAlign);
    for (int32_t i = 0; i < segment.num_ranks; ++i) {
      blocks_[segment.first_rank + i] = {base + i * layout.total, &layout};
    }
  }
  for (int32_t i = 0; i < num_local_ranks(); ++i) {
    const BlockView own = block(first_local_rank() + i);
    for (int section = 0; section < kNumSections; ++section) {
      std::memset(own.base + layout.guard(section), kGuardByte, kGuardBytes);
    }
  }
  // As if all earlier generations had run.
  const uint32_t before = options.first_generation - 1;
  for (uint32_t& word : local_words()->arrivals) word = before * options.shape.slots.num_ranks;
  for (int32_t i = 0; i < num_local_ranks(); ++i) {
    for (uint32_t& word : block(first_local_rank() + i).words()->arrived) word = before;
  }
  plan_scratch_.resize(plan_scratch_bytes(options.plan_config()) / sizeof(int64_t) + 1);
  const size_t slots = static_cast<size_t>(options.plan_config().max_broadcasts());
  slot_tables_.assign(options.shape.num_banks, {0, std::vector<int32_t>(slots, -1)});
  for (int32_t i = 0; i < num_local_ranks(); i += options.ranks_per_device) {
    const int32_t rank = first_local_rank() + i;
    devices_[rank] = std::make_unique<Device>(*this, rank);
  }
}

Domain::~Domain() {
  devices_.clear();  // joins the threads that read what goes now
  for (const PlacedMemory& memory : placed_)
    munmap(const_cast<uint8_t*>(memory.base), memory.bytes);
}

Device* Domain::device_of(int32_t first_rank) {
  const auto found = devices_.find(first_rank);
  return found == devices_.end() ? nullptr : found->second.get();
}

bool Domain::is_local(int32_t rank) const {
  return first_local_rank() <= rank && rank < first_local_rank() + num_local_ranks();
}

uint64_t Domain::serial_of(const CallKey& key, int32_t device_rank) {
  std::lock_guard lock(order_mutex_);
  Run& run = runs_[key];
  const size_t index = run.started[device_rank]++;
  if (index == run.serials.size()) run.serials.push_back(num_invocations_++);
  const uint64_t serial = run.serials[index];
  // Once every device has come as far, nothing needs to be remembered.
  const bool all_came = run.started.size() == devices_.size() &&
                        std::all_of(run.started.begin(), run.started.end(), [&](const auto& entry) {
                          return entry.second == run.serials.size();
                        });
  if (all_came) runs_.erase(key);
  return serial;
}

void Domain::arrive(Stage stage, int32_t rank, uint32_t generation) {
  const int index = static_cast<int>(stage);
  const int64_t late =
      stalls_[(rank - first_local_rank()) * static_cast<int>(Stage::kNumStages) + index].exchange(
          0, std::memory_order_relaxed);
  if (late > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(late));
  store_release(&block(rank).words()->arrived[index], generation);
  const uint32_t complete = generation * static_cast<uint32_t>(options.shape.slots.num_ranks);
  for (const Segment& segment : segments_) {
    uint32_t* word = &words_of(segment)->arrivals[index];
    if (add_release(word, 1) == complete) wake_all(word);
  }
}

int64_t Domain::limit_for(const Invocation& invocation) const {
  return invocation.is_first ? options.startup_timeout_ns : options.timeout_ns;
}

int64_t Domain::deadline_for(const Invocation& invocation) const {
  return now_ns() + limit_for(invocation);
}

// READY waits for staging, and combine for everything: their limits run out at about the same time,
// and the rank to name is the one that holds up the earliest of them.
Missing Domain::find_missing(Stage stage, uint32_t generation) const {
  for (const Stage cause : {Stage::kCounts, Stage::kStaged, Stage::kDispatch, Stage::kReady}) {
    const bool holds_up = cause == stage || stage == Stage::kCombine ||
                          (cause == Stage::kStaged && stage == Stage::kReady);
    for (int32_t r = 0; holds_up && r < options.shape.slots.num_ranks; ++r) {
      const uint32_t seen = load_acquire(&block(r).words()->arrived[static_cast<int>(cause)]);
      if (!has_reached(seen, generation)) return {cause, r};
    }
  }
  return {stage, -1};
}

// Whether the process of the missing rank has left. It left after its last call, so a rank of it
// that has not arrived by then never will.
bool Domain::never_comes(const Missing& missing, uint32_t generation) const {
  if (missing.rank < 0 || is_local(missing.rank)) return false;
  if (load_acquire(&words_of(segment_of(missing.rank))->is_leaving) == 0) return false;
  return find_missing(missing.stage, generation).rank == missing.rank;
}

// Between two sleeps: false when the Domain has failed, a peer is gone, or the time is up.
bool Domain::keep_waiting(const Missing& missing, int32_t rank, const Invocation& invocation,
                          int64_t deadline) {
  if (has_failed()) return false;
  ErrorWord error{static_cast<int32_t>(ErrorCode::kTimeout),
                  rank,
                  missing.rank,
                  invocation.call.layer,
                  static_cast<int32_t>(missing.stage),
                  invocation.generation,
                  0,
                  0};
  if (never_comes(missing, invocation.generation)) {
    error.code = static_cast<int32_t>(ErrorCode::kClosed);
    fail(error);
    return false;
  }
  for (const Segment& segment : segments_) {
    if (!is_gone(segment.alive_fd)) continue;
    if (load_acquire(&words_of(segment)->is_leaving) != 0) continue;
    error.code = static_cast<int32_t>(ErrorCode::kPeerDied);
    error.peer = segment.first_rank;
    fail(error);
    return false;
  }
  if (now_ns() < deadline) return true;
  error.expected = static_cast<uint64_t>(limit_for(invocation) / 1'000'000);
  error.found = invocation.is_first;
  fail(error);
  return false;
}

bool Domain::wait(Stage stage, int32_t rank, const Invocation& invocation) {
  const uint32_t* word = &local_words()->arrivals[static_cast<int>(stage)];
  const uint32_t complete =
      invocation.generation * static_cast<uint32_t>(options.shape.slots.num_ranks);
  const int64_t deadline = deadline_for(invocation);
  for (uint32_t seen; !has_reached(seen = load_acquire(word), complete);) {
    const Missing missing = find_missing(stage, invocation.generation);
    if (!keep_waiting(missing, rank, invocation, deadline)) return false;
    sleep_on(word, seen, kSliceNs);
  }
  return !has_failed();
}

bool Domain::wait_combined(int32_t rank, const Invocation& invocation) {
  RankWords* words = block(rank).words();
  const int64_t deadline = deadline_for(invocation);
  for (uint32_t done; (done = load_acquire(&words->routes_done)) != words->routes_expected;) {
    const Missing missing = find_missing(Stage::kCombine, invocation.generation);
    if (!keep_waiting(missing, rank, invocation, deadline)) return false;
    sleep_on(&words->routes_done, done, kSliceNs);
  }
  return !has_failed();
}

bool Domain::wait_planned(Invocation& invocation) {
  // COPY's own waits have limits, so this one ends with them.
  while (load_acquire(&invocation.is_planned) == 0) sleep_on(&invocation.is_planned, 0, kSliceNs);
  return !has_failed();
}

void Domain::wake_everyone() {
  for (const Segment& segment : segments_) {
    for (uint32_t& word : words_of(segment)->arrivals) wake_all(&word);
  }
  for (const BlockView& view : blocks_) wake_all(&view.words()->routes_done);
}

void Domain::fail(const ErrorWord& error) {
  for (const Segment& segment : segments_) {
    ProcessWords* words = words_of(segment);
    uint32_t expected = 0;
    // 2 marks an error being written; 1 one that can be read. The first error stays.
    if (__atomic_compare_exchange_n(&words->aborted, &expected, 2u, false, __ATOMIC_ACQ_REL,
                                    __ATOMIC_ACQUIRE)) {
      words->error = error;
      store_release(&words->aborted, 1);
    }
  }
  wake_everyone();
}

void Domain::fail_closed() {
  ErrorWord error{static_cast<int32_t>(ErrorCode::kClosed), first_local_rank(), -1, -1, 0, 0, 0, 0};
  for (const auto& [rank, device] : devices_) {
    const std::shared_ptr<Invocation> invocation = device->oldest();
    if (!invocation) continue;
    const Missing missing = find_missing(Stage::kCombine, invocation->generation);
    error.rank = rank;
    error.layer = invocation->call.layer;
    error.stage = static_cast<int32_t>(missing.stage);
    error.generation = invocation->generation;
    break;
  }
  fail(error);
}

void Domain::leave() {
  store_release(&local_words()->is_leaving, 1);
  wake_everyone();
}

// The fences order "reading, so not failed" against "failed, so nobody reads".
bool Domain::begin_reading() {
  num_reading_.fetch_add(1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  if (!has_failed()) return true;
  end_reading();
  return false;
}

void Domain::wait_readers() const {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  while (num_reading_.load(std::memory_order_acquire) != 0) {
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
}

ErrorWord Domain::error() const {
  const ProcessWords* words = local_words();
  uint32_t state;
  while ((state = load_acquire(&words->aborted)) == 2) std::this_thread::yield();
  return state == 0 ? ErrorWord{} : words->error;
}

std::string Domain::error_text() const {
  return iser::error_text(error(), options.startup_timeout_ns != options.timeout_ns);
}

void Domain::check_guards() {
  for (int32_t i = 0; i < num_local_ranks(); ++i) {
    const BlockView own = block(first_local_rank() + i);
    for (int section = 0; section < kNumSections; ++section) {
      const uint8_t* guard = own.base + layout.guard(section);
      if (std::all_of(guard, guard + kGuardBytes, [](uint8_t b) { return b == kGuardByte; })) {
        continue;
      }
      fail({static_cast<int32_t>(ErrorCode::kCorrupt), first_local_rank() + i, -1, -1, 0, 0,
            static_cast<uint64_t>(section), 0});
      return;
    }
  }
}

void Domain::add_placed(const PlacedMemory& memory) {
  std::lock_guard lock(placed_mutex_);
  placed_.push_back(memory);
}

const Segment& Domain::segment_of(int32_t rank) const {
  return *std::find_if(segments_.begin(), segments_.end(), [&](const Segment& segment) {
    return segment.first_rank <= rank && rank < segment.first_rank + segment.num_ranks;
  });
}

const PlacedMemory* Domain::find_placed(int32_t rank, uint64_t address) const {
  const int32_t first_rank = segment_of(rank).first_rank;
  std::lock_guard lock(placed_mutex_);
  for (const PlacedMemory& memory : placed_) {  // a deque: entries never move
    if (memory.first_rank == first_rank && memory.owner_base <= address &&
        address < memory.owner_base + memory.bytes) {
      return &memory;
    }
  }
  return nullptr;
}

bool Domain::is_placed(int32_t rank, uint32_t generation) const {
  const CallTag& tag = block(rank).words()->tags[generation & 1];
  return std::all_of(tag.weights, tag.weights + bundle().num_planes,
                     [&](uint64_t address) { return find_placed(rank, address) != nullptr; });
}

bool Domain::home_planes(int32_t owner, int32_t expert, uint32_t generation,
                         const uint8_t* planes[kMaxPlanes]) const {
  const CallTag& tag = block(owner).words()->tags[generation & 1];
  const size_t home_idx = expert % options.shape.slots.num_home();
  for (int32_t i = 0; i < bundle().num_planes; ++i) {
    const size_t at = home_idx * bundle().planes[i].bytes;
    if (is_local(owner)) {
      planes[i] = reinterpret_cast<const uint8_t*>(tag.weights[i]) + at;
      continue;
    }
    const PlacedMemory* memory = find_placed(owner, tag.weights[i]);
    if (!memory) return false;
    planes[i] = memory->base + (tag.weights[i] - memory->owner_base) + at;
  }
  return true;
}

void Domain::stall(int32_t rank, Stage stage, int64_t ns) {
  stalls_[(rank - first_local_rank()) * static_cast<int>(Stage::kNumStages) +
          static_cast<int>(stage)] = ns;
}

void Domain::charge(int32_t layer, int32_t rank, int64_t ns, int64_t rows) {
  const size_t at = static_cast<size_t>(layer) * num_local_ranks() + rank - first_local_rank();
  busy_ns[at].fetch_add(ns, std::memory_order_relaxed);
  tile_rows[at].fetch_add(rows, std::memory_order_relaxed);
}

void Domain::record(const Timeline& times, int32_t device_rank) {
  std::lock_guard lock(record_mutex_);
  timelines_.emplace_back(device_rank, times);
  if (timelines_.size() > kMaxTimelines) timelines_.pop_front();
}

std::vector<std::pair<int32_t, Timeline>> Domain::timelines() {
  std::lock_guard lock(record_mutex_);
  return {timelines_.begin(), timelines_.end()};
}

bool Domain::wait_idle(int64_t limit_ns) {
  const int64_t deadline = now_ns() + limit_ns;
  while (!is_idle()) {
    if (now_ns() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

bool Domain::is_idle() {
  return std::all_of(devices_.begin(), devices_.end(),
                     [](auto& entry) { return entry.second->oldest() == nullptr; });
}

}  // namespace iser::cpu
