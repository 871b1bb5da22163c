// Links: ffi/cpu/*.cc
//
// The CPU runtime without XLA: threads stand for devices, two Domains over the same segments for
// two processes. Outputs with replicas must have the bits of outputs without, and every call must
// end, also when ranks are late, Domains close or peers fail. Run it under TSan and ASan.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cpu/domain.h"
#include "tests/shapes.h"

namespace {

using namespace iser;
using namespace iser::cpu;

constexpr int32_t kRanks = 4, kExperts = 8, kSlots = 2, kTopK = 2, kHidden = 24, kIntermediate = 40;
constexpr int32_t kTokens = 12;
const BundleLayout kBundle = bundle_layout(WeightFormat::kFloat32, kHidden, kIntermediate, true);

[[noreturn]] void fail(const char* test, const std::string& what) {
  std::fprintf(stderr, "%s: %s\n", test, what.c_str());
  std::exit(1);
}

// Operands of all ranks: rank 0's experts are hot.
struct Problem {
  std::vector<float> x, topk_weights, planes[kMaxPlanes];
  std::vector<int32_t> ids;

  explicit Problem(uint32_t seed) {
    std::mt19937 rng(seed);
    const auto fill = [&](std::vector<float>& values, size_t size) {
      std::normal_distribution<float> normal(0.0f, 0.2f);
      values.resize(size);
      for (float& value : values) value = normal(rng);
    };
    fill(x, static_cast<size_t>(kRanks) * kTokens * kHidden);
    fill(topk_weights, static_cast<size_t>(kRanks) * kTokens * kTopK);
    for (int i = 0; i < kBundle.num_planes; ++i) {
      fill(planes[i], kExperts * kBundle.planes[i].bytes / sizeof(float));
    }
    for (int32_t i = 0; i < kRanks * kTokens * kTopK; ++i) {
      ids.push_back(static_cast<int32_t>(rng() % 3 ? rng() % 2 : rng() % (kExperts + 1)));
    }
  }
};

DomainOptions make_options(int32_t ranks_per_device, CopyRule rule, int64_t timeout_ms) {
  DomainOptions options{};
  options.shape = make_shape({kRanks, kExperts, kSlots}, kTopK, kHidden, kIntermediate, kTokens,
                             sizeof(float), 2, kSlots);
  options.shape.has_biases = true;
  options.shape.activation = {ActivationKind::kClampedSwiglu, 0.5f, 1.702f, 1.0f};
  options.dtype = DType::kF32;
  options.min_group_size = 1;
  options.copy_rule = rule;
  options.num_layers = 2;
  options.ranks_per_device = ranks_per_device;
  options.max_routes_per_rank = 9;  // several waves
  options.timeout_ns = timeout_ms * 1'000'000;
  options.startup_timeout_ns = timeout_ms * 1'000'000;
  options.poison = true;
  return options;
}

// Segments of `num_processes` in this process's memory; outlives the Domains over it.
struct Memory {
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> bases;
  std::vector<Segment> segments;

  Memory(const DomainOptions& options, int32_t num_processes) {
    const int32_t ranks = kRanks / num_processes;
    const size_t bytes = align_up(segment_bytes(options.shape, ranks), 4096);
    for (int32_t p = 0; p < num_processes; ++p) {
      bases.emplace_back(static_cast<uint8_t*>(std::aligned_alloc(4096, bytes)), &std::free);
      std::memset(bases.back().get(), 0, bytes);
      segments.push_back({bases.back().get(), p * ranks, ranks, -1});
    }
  }
};

struct Outputs {
  std::vector<float> y;
  std::vector<int32_t> route_slot, broadcasts, quota, load_before, load;
  int32_t num_broadcasts = -1, status = -1;
  uint32_t generation = 0;

  explicit Outputs(int32_t ranks)
      : y(static_cast<size_t>(ranks) * kTokens * kHidden),
        route_slot(static_cast<size_t>(ranks) * kTokens * kTopK),
        broadcasts(kRanks * kSlots * 6),
        quota(kRanks * kSlots * kRanks),
        load_before(kRanks),
        load(kRanks) {}

  PlanOutputs plan() {
    return {route_slot.data(),  broadcasts.data(), quota.data(), &num_broadcasts,
            load_before.data(), load.data(),       &status,      &generation};
  }
};

// One device's part of one call. The weights are freed as soon as the call has completed, as XLA
// frees donated ones: nobody may still read them.
class DeviceCall {
 public:
  DeviceCall(Domain& domain, const Problem& problem, int32_t rank, const CallKey& key,
             int32_t layer, bool is_balanced)
      : problem_(problem), rank_(rank), device_(domain.device_of(rank)) {
    const size_t ranks = domain.options.ranks_per_device, home = kExperts / kRanks;
    StartCall call{};
    call.layer = layer;
    call.is_balanced = is_balanced;
    call.num_tokens = kTokens;
    call.topk_ids = problem.ids.data() + static_cast<size_t>(rank) * kTokens * kTopK;
    for (int i = 0; i < kBundle.num_planes; ++i) {
      const size_t plane = kBundle.planes[i].bytes / sizeof(float);
      const float* first = problem.planes[i].data() + rank * home * plane;
      planes_[i].assign(first, first + ranks * home * plane);
      call.weights[i] = reinterpret_cast<const uint8_t*>(planes_[i].data());
    }
    generation_ = device_->start(key, call, {}, nullptr);
  }

  void fused_moe(Outputs& outputs) {
    const size_t row = static_cast<size_t>(rank_) * kTokens;
    device_->fused_moe(
        generation_,
        {reinterpret_cast<const uint8_t*>(problem_.x.data() + row * kHidden),
         problem_.topk_weights.data() + row * kTopK, reinterpret_cast<uint8_t*>(outputs.y.data()),
         outputs.plan(), [done = done_](const std::string& error) { done->set_value(error); }});
  }

  std::string wait() { return done_->get_future().get(); }

 private:
  const Problem& problem_;
  const int32_t rank_;
  Device* const device_;
  std::vector<float> planes_[kMaxPlanes];
  uint32_t generation_;
  std::shared_ptr<std::promise<std::string>> done_ = std::make_shared<std::promise<std::string>>();
};

// What one device's program does in one call; returns the call's error.
std::string call_device(Domain& domain, const Problem& problem, int32_t rank, int64_t run,
                        int32_t layer, bool is_balanced, Outputs& outputs) {
  DeviceCall call(domain, problem, rank, {run, 1}, layer, is_balanced);
  call.fused_moe(outputs);
  return call.wait();
}

// One call of every device of every Domain, a thread each: all outputs in rank order.
std::vector<float> call_all(const char* test, const std::vector<Domain*>& domains,
                            const Problem& problem, int64_t run, int32_t layer, bool is_balanced) {
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Outputs>> outputs;
  std::vector<std::string> errors(kRanks);
  for (Domain* domain : domains) {
    const int32_t ranks = domain->options.ranks_per_device, first = domain->first_local_rank();
    for (int32_t r = first; r < first + domain->num_local_ranks(); r += ranks) {
      outputs.push_back(std::make_unique<Outputs>(ranks));
      Outputs& mine = *outputs.back();
      std::string& error = errors[outputs.size() - 1];
      threads.emplace_back([domain, &problem, r, run, layer, is_balanced, &mine, &error] {
        error = call_device(*domain, problem, r, run, layer, is_balanced, mine);
      });
    }
  }
  for (auto& thread : threads) thread.join();
  std::vector<float> y;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!errors[i].empty()) fail(test, errors[i]);
    if (outputs[i]->status != 0) fail(test, "status is not 0");
    if ((outputs[i]->num_broadcasts > 0) != is_balanced) fail(test, "broadcasts do not fit");
    y.insert(y.end(), outputs[i]->y.begin(), outputs[i]->y.end());
  }
  return y;
}

void expect_same(const char* test, const std::vector<float>& found,
                 const std::vector<float>& expected) {
  for (size_t i = 0; i < expected.size(); ++i) {
    if (std::memcmp(&found[i], &expected[i], sizeof(float)) != 0) {
      fail(test, "element " + std::to_string(i) + " is " + std::to_string(found[i]) +
                     ", expected " + std::to_string(expected[i]));
    }
  }
}

const std::vector<float>& reference_output(const Problem& problem) {
  static std::vector<float> y;
  if (y.empty()) {
    const DomainOptions options = make_options(kRanks, CopyRule::kOwnerDirect, 60'000);
    Memory memory(options, 1);
    Domain domain(options, memory.segments, 0);
    y = call_all("reference", {&domain}, problem, 1, 0, false);
  }
  return y;
}

void test_bits(int32_t num_processes, int32_t ranks_per_device, CopyRule rule,
               uint32_t first_generation = 1) {
  const std::string name = "bits, " + std::to_string(num_processes) + " processes, " +
                           std::to_string(ranks_per_device) + " ranks a device, rule " +
                           std::to_string(static_cast<int>(rule)) + ", from generation " +
                           std::to_string(first_generation);
  const Problem problem(1);
  DomainOptions options = make_options(ranks_per_device, rule, 60'000);
  options.first_generation = first_generation;
  Memory memory(options, num_processes);
  std::vector<std::unique_ptr<Domain>> owned;
  std::vector<Domain*> domains;
  for (int32_t p = 0; p < num_processes; ++p) {
    owned.push_back(std::make_unique<Domain>(options, memory.segments, p));
    domains.push_back(owned.back().get());
  }
  for (int64_t run = 1; run <= 6; ++run) {
    const auto y = call_all(name.c_str(), domains, problem, run, run % 2, run % 3 != 0);
    expect_same(name.c_str(), y, reference_output(problem));
  }
  for (Domain* domain : domains) {
    domain->check_guards();
    if (domain->has_failed()) fail(name.c_str(), domain->error_text());
    if (!domain->wait_idle(1'000'000'000)) fail(name.c_str(), "not idle");
  }
}

// What no route writes is NaN after a call, so that a read of it would show in the output.
void test_poison() {
  Problem problem(1);
  for (size_t i = 0; i < problem.ids.size(); i += 5) problem.ids[i] = i % 2 ? -1 : kExperts;
  const DomainOptions options = make_options(kRanks, CopyRule::kOwnerDirect, 60'000);
  Memory memory(options, 1);
  Domain domain(options, memory.segments, 0);
  for (int64_t run = 1; run <= 2; ++run) {
    call_all("poison", {&domain}, problem, run, 0, true);
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const float* rows = domain.block(rank).section<float>(Section::kCombine);
      for (int32_t route = 0; route < kTokens * kTopK; ++route) {
        const bool is_padded =
            !is_valid_expert(problem.ids[rank * kTokens * kTopK + route], kExperts);
        for (int32_t d = 0; d < kHidden; ++d) {
          const float value = rows[route * kHidden + d];
          if ((value != value) != is_padded) fail("poison", is_padded ? "no NaN" : "a NaN");
        }
      }
    }
  }
}

// A call is in flight until its fused_moe has ended, and its copies take as long as they take.
void test_idle_and_copies() {
  const Problem problem(1);
  const DomainOptions options = make_options(kRanks, CopyRule::kOwnerDirect, 60'000);
  Memory memory(options, 1);
  Domain domain(options, memory.segments, 0);
  Outputs outputs(kRanks);
  constexpr int64_t kLateNs = 100'000'000;
  domain.stall(1, Stage::kStaged, kLateNs);
  DeviceCall call(domain, problem, 0, {1, 1}, 0, true);
  if (domain.wait_idle(kLateNs / 10)) fail("idle", "a call is in flight");
  call.fused_moe(outputs);
  if (const std::string error = call.wait(); !error.empty()) fail("idle", error);
  if (!domain.wait_idle(1'000'000'000)) fail("idle", "no call is in flight");
  const Timeline times = domain.timelines().back().second;
  if (times.copy_end - times.copy_begin < kLateNs * 9 / 10) fail("copies", "they took no time");
}

// Each device's programs start several calls before they complete them, in whatever order.
void test_calls_in_flight() {
  const Problem problem(1);
  const DomainOptions options = make_options(1, CopyRule::kPerSlot, 60'000);
  Memory memory(options, 1);
  Domain domain(options, memory.segments, 0);
  std::vector<std::thread> threads;
  for (int64_t run = 1; run <= 4; ++run) {
    threads.emplace_back([&, run] {
      const auto y = call_all("in flight", {&domain}, problem, run, 0, true);
      expect_same("in flight", y, reference_output(problem));
    });
  }
  for (auto& thread : threads) thread.join();
}

// Two calls of a program that nothing orders: half of the devices start and complete them in one
// order, half in the other. Neither may take the other's counts, tokens or weights.
void test_independent_calls() {
  const Problem problems[2] = {Problem(1), Problem(2)};
  const DomainOptions options = make_options(1, CopyRule::kPerSlot, 20'000);
  Memory memory(options, 1);
  Domain domain(options, memory.segments, 0);
  std::vector<float> expected[2], found[2];
  for (int i = 0; i < 2; ++i) {
    expected[i] = call_all("independent", {&domain}, problems[i], 1 + i, 0, false);
  }
  std::vector<std::unique_ptr<Outputs>> outputs;
  for (int i = 0; i < 2 * kRanks; ++i) outputs.push_back(std::make_unique<Outputs>(1));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const int first = rank % 2, second = 1 - first;
      std::unique_ptr<DeviceCall> calls[2];
      for (const int i : {first, second}) {
        calls[i] = std::make_unique<DeviceCall>(domain, problems[i], rank,
                                                CallKey{3, static_cast<uint64_t>(10 + i)}, 0, true);
      }
      calls[second]->fused_moe(*outputs[2 * rank + second]);
      // Time for a device that would not wait for its turn to begin.
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      calls[first]->fused_moe(*outputs[2 * rank + first]);
      for (const auto& call : calls) {
        if (const std::string error = call->wait(); !error.empty()) fail("independent", error);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  for (int i = 0; i < 2; ++i) {
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const std::vector<float>& y = outputs[2 * rank + i]->y;
      found[i].insert(found[i].end(), y.begin(), y.end());
    }
    expect_same("independent", found[i], expected[i]);
  }
}

// Many calls of a program that nothing orders, in another order on each device, while generations
// wrap around: the queues may not take 0 for the oldest.
void test_wrap(uint32_t calls_before) {
  constexpr int kCalls = 8;
  const std::string name = "wrap after " + std::to_string(calls_before) + " calls";
  const Problem problem(1);
  DomainOptions options = make_options(1, CopyRule::kPerSlot, 10'000);
  options.first_generation = 0u - calls_before;
  Memory memory(options, 1);
  Domain domain(options, memory.segments, 0);
  std::vector<std::unique_ptr<Outputs>> outputs;
  for (int i = 0; i < kCalls * kRanks; ++i) outputs.push_back(std::make_unique<Outputs>(1));
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      std::unique_ptr<DeviceCall> calls[kCalls];
      for (int i = 0; i < kCalls; ++i) {
        const int c = (i + 3 * rank) % kCalls;
        calls[c] = std::make_unique<DeviceCall>(domain, problem, rank,
                                                CallKey{1, static_cast<uint64_t>(c)}, 0, true);
      }
      for (int c = kCalls - 1; c >= 0; --c) calls[c]->fused_moe(*outputs[c * kRanks + rank]);
      for (const auto& call : calls) {
        if (const std::string error = call->wait(); !error.empty()) fail(name.c_str(), error);
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<bool> seen(kCalls);
  for (int c = 0; c < kCalls; ++c) {
    std::vector<float> y;
    for (int32_t rank = 0; rank < kRanks; ++rank) {
      const Outputs& mine = *outputs[c * kRanks + rank];
      y.insert(y.end(), mine.y.begin(), mine.y.end());
      const uint32_t serial = mine.generation - options.first_generation;
      if (serial >= kCalls) fail(name.c_str(), "generation " + std::to_string(mine.generation));
      if (rank == 0) seen[serial] = true;
    }
    expect_same(name.c_str(), y, reference_output(problem));
  }
  for (const bool is_seen : seen) {
    if (!is_seen) fail(name.c_str(), "two calls of one generation");
  }
}

// The limit of the first call is that of no later one, whatever its generation.
void test_first_limit() {
  const Problem problem(1);
  DomainOptions options = make_options(kRanks, CopyRule::kOwnerDirect, 60'000);
  options.timeout_ns = 300'000'000;
  options.first_generation = 0u;  // the next is 1
  Memory memory(options, 1);
  Domain domain(options, memory.segments, 0);
  Outputs outputs(kRanks);
  domain.stall(1, Stage::kCounts, 600'000'000);  // longer than a later call may take
  call_all("first limit", {&domain}, problem, 1, 0, true);
  StartCall call{};  // without its fused_moe
  call.num_tokens = kTokens;
  call.topk_ids = problem.ids.data();
  domain.device_of(0)->start({2, 1}, call, {}, nullptr);
  const std::string error = call_device(domain, problem, 0, 3, 0, true, outputs);
  if (error.find("waited 300 ms for the call before this one") == std::string::npos) {
    fail("first limit", error);
  }
}

// Processes that plan otherwise, which only other versions of the planner should: all are told.
void test_plan_mismatch() {
  const Problem problem(1);
  DomainOptions options = make_options(1, CopyRule::kOwnerDirect, 20'000);
  Memory memory(options, 2);
  std::vector<std::unique_ptr<Domain>> domains;
  for (int32_t p = 0; p < 2; ++p) {
    options.min_routes = p == 0 ? 0 : 1'000'000;
    domains.push_back(std::make_unique<Domain>(options, memory.segments, p));
  }
  std::vector<std::unique_ptr<Outputs>> outputs;
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < kRanks; ++rank) {
    outputs.push_back(std::make_unique<Outputs>(1));
    threads.emplace_back([&, rank, mine = outputs.back().get()] {
      const std::string error = call_device(*domains[rank / 2], problem, rank, 1, 0, true, *mine);
      if (error.find("has plan hash") == std::string::npos) fail("plan mismatch", error);
      for (float value : mine->y) {
        if (value == value) fail("plan mismatch", "a failed call's output is not NaN");
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// One process leaves while the other makes one more call, which ends at once with its own place.
void test_leaving() {
  const Problem problem(1);
  const DomainOptions options = make_options(1, CopyRule::kOwnerDirect, 60'000);
  Memory memory(options, 2);
  std::vector<std::unique_ptr<Domain>> owned;
  std::vector<Domain*> domains;
  for (int32_t p = 0; p < 2; ++p) {
    owned.push_back(std::make_unique<Domain>(options, memory.segments, p));
    domains.push_back(owned.back().get());
  }
  call_all("leaving", domains, problem, 1, 0, true);
  if (!domains[1]->wait_idle(1'000'000'000)) fail("leaving", "not idle");
  domains[1]->leave();
  if (!domains[1]->wait_idle(0)) fail("leaving", "an idle Domain looks busy without time to wait");
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Outputs>> outputs;
  for (int32_t rank = 0; rank < 2; ++rank) {
    outputs.push_back(std::make_unique<Outputs>(1));
    threads.emplace_back([&, rank, mine = outputs.back().get()] {
      const std::string error = call_device(*domains[0], problem, rank, 2, 1, true, *mine);
      if (error.find("that rank 2 does not make") == std::string::npos ||
          error.find("in layer 1, stage counts, generation 2") == std::string::npos) {
        fail("leaving", error);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

// A rank later than the limit: every call ends with an error, at once from then on.
void test_late_rank(Stage stage, int32_t num_processes) {
  const std::string name = std::string("late at ") + stage_name(stage);
  const Problem problem(1);
  const DomainOptions options = make_options(1, CopyRule::kSami, 400);
  Memory memory(options, num_processes);
  std::vector<std::unique_ptr<Domain>> domains;
  for (int32_t p = 0; p < num_processes; ++p) {
    domains.push_back(std::make_unique<Domain>(options, memory.segments, p));
  }
  domains[0]->stall(1, stage, 1'500'000'000);
  if (stage == Stage::kStaged) {
    // These begin to wait for it later than for READY, which it holds up: READY's limit ends first.
    for (int32_t r : {0, 2, 3}) {
      Domain& domain = *domains[r * num_processes / kRanks];
      domain.stall(r, stage, 150'000'000);
    }
  }
  std::vector<std::thread> threads;
  std::vector<std::unique_ptr<Outputs>> outputs;
  for (auto& domain : domains) {
    for (int32_t i = 0; i < domain->num_local_ranks(); ++i) {
      outputs.push_back(std::make_unique<Outputs>(1));
      Outputs& mine = *outputs.back();
      const int32_t rank = domain->first_local_rank() + i;
      threads.emplace_back([&, rank, d = domain.get()] {
        for (int64_t run = 1; run <= 2; ++run) {
          const std::string error = call_device(*d, problem, rank, run, 0, true, mine);
          if (error.rfind("IserError: rank ", 0) != 0) fail(name.c_str(), "error: " + error);
          if (error.find("for rank 1 in layer 0") == std::string::npos) fail(name.c_str(), error);
          for (float value : mine.y) {
            if (value == value) fail(name.c_str(), "a failed call's output is not NaN");
          }
          if (mine.status != static_cast<int32_t>(ErrorCode::kTimeout))
            fail(name.c_str(), "status");
        }
      });
    }
  }
  for (auto& thread : threads) thread.join();
}

// Closing with calls that wait for a rank that never comes: they all end.
void test_close_in_flight(bool is_plan_only) {
  const Problem problem(1);
  const DomainOptions options = make_options(1, CopyRule::kSami, 60'000);
  Memory memory(options, 1);
  auto domain = std::make_unique<Domain>(options, memory.segments, 0);
  std::atomic<int> ended{0};
  std::vector<std::unique_ptr<Outputs>> outputs;
  int called = 0;
  for (int32_t rank = 0; rank < kRanks - 1; ++rank) {
    outputs.push_back(std::make_unique<Outputs>(1));
    StartCall call{};
    call.is_balanced = true;
    call.is_plan_only = is_plan_only;
    call.num_tokens = kTokens;
    call.topk_ids = problem.ids.data();
    const auto count = [&ended](const std::string& error) {
      if (error.empty()) fail("close in flight", "a call without a peer succeeded");
      ++ended;
    };
    Device* device = domain->device_of(rank);
    const uint32_t generation =
        device->start({1, 1}, call, is_plan_only ? outputs.back()->plan() : PlanOutputs{},
                      is_plan_only ? Done(count) : Done(nullptr));
    ++called;
    if (!is_plan_only) {
      for (int i = 0; i < kBundle.num_planes; ++i) call.weights[i] = nullptr;
      device->fused_moe(
          generation,
          {reinterpret_cast<const uint8_t*>(problem.x.data()), problem.topk_weights.data(),
           reinterpret_cast<uint8_t*>(outputs.back()->y.data()), outputs.back()->plan(), count});
    }
  }
  if (domain->wait_idle(20'000'000)) fail("close in flight", "idle without a peer");
  domain->fail_closed();
  if (domain->error_text().find("closed in layer 0, stage counts, generation 1") ==
      std::string::npos) {
    fail("close in flight", domain->error_text());
  }
  domain.reset();
  if (ended != called) {
    fail("close in flight", std::to_string(ended) + " of " + std::to_string(called) + " ended");
  }
}

}  // namespace

int main() {
  for (CopyRule rule : {CopyRule::kOwnerDirect, CopyRule::kSami, CopyRule::kPerSlot}) {
    test_bits(1, 1, rule);
    test_bits(1, 2, rule);
    test_bits(2, 1, rule);
    test_bits(2, 2, rule);
  }
  test_bits(4, 1, CopyRule::kSami);
  test_bits(2, 1, CopyRule::kSami, 0u - 3);
  test_bits(1, 2, CopyRule::kPerSlot, 0u - 1);
  for (const uint32_t calls : {1, 4, 7}) test_wrap(calls);
  test_first_limit();
  test_plan_mismatch();
  test_leaving();
  test_poison();
  test_idle_and_copies();
  test_calls_in_flight();
  test_independent_calls();
  for (Stage stage : {Stage::kCounts, Stage::kDispatch, Stage::kReady}) test_late_rank(stage, 1);
  for (Stage stage : {Stage::kCounts, Stage::kStaged, Stage::kDispatch}) test_late_rank(stage, 2);
  test_close_in_flight(true);
  test_close_in_flight(false);
  std::printf("domain: all equal, all calls ended\n");
  return 0;
}
