// The CUDA plan against the C++ core, array by array; faults; replay. Prints a line a case.
//
//   test_plan [--small] [--gpus N] [--seed S] [--plant memcheck|racecheck]
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "tests/cuda/plan_domain.cuh"
#include "tests/cuda/plant.cuh"

using namespace iser;
using namespace iser::cuda;

namespace {

int num_passed = 0, num_failed = 0;
bool is_small = false;
uint32_t base_seed = 1;

void report(const std::string& name, const std::string& why) {
  (why.empty() ? num_passed : num_failed)++;
  if (!why.empty() && num_failed > 40) return;
  std::printf("%s %s%s%s\n", why.empty() ? "ok  " : "FAIL", name.c_str(), why.empty() ? "" : ": ",
              why.c_str());
  std::fflush(stdout);
}

std::string compare_plan(const PlanConfig& config, const CorePlan& want,
                         const std::vector<int32_t>& broadcasts, const std::vector<int32_t>& quota,
                         const std::vector<int32_t>& load_before, const std::vector<int32_t>& load,
                         int32_t num_broadcasts) {
  std::string why;
  const auto check = [&](const char* what, const auto* got, const auto* expected, size_t count) {
    if (why.empty()) why = first_difference(what, got, expected, count);
  };
  check("num_broadcasts", &num_broadcasts, &want.num_broadcasts, 1);
  check("load_before", load_before.data(), want.load_before.data(), load_before.size());
  check("load", load.data(), want.load.data(), load.size());
  check("broadcasts", broadcasts.data(), reinterpret_cast<const int32_t*>(want.broadcasts.data()),
        want.broadcasts.size() * 6);
  check("quota", quota.data(), want.quota.data(), want.quota.size());
  (void)config;
  return why;
}

// Stages 2 to 4 alone.
void test_counts(int32_t ranks, int32_t cases) {
  std::mt19937 rng(base_seed * 1000 + ranks);
  int32_t bad = 0;
  int64_t broadcasts_seen = 0;
  int32_t above_32 = 0, above_64 = 0;  // plans of so many
  std::string first_bad;
  DeviceArray<int32_t> counts(ranks * 1024), broadcasts(ranks * 16 * 6), load_before(ranks),
      load(ranks), scalars(2), resident(ranks * 16);
  DeviceArray<int32_t> quota(static_cast<size_t>(ranks) * 16 * ranks);
  DeviceArray<uint64_t> hash(1);
  for (int32_t i = 0; i < cases; ++i) {
    const int32_t kind = i % 11;
    const PlanConfig config = kind == 10 ? crowded_config(rng, ranks) : random_config(rng, ranks);
    const int32_t experts = config.slots.num_experts, rows = config.max_broadcasts();
    CHECK_CUDA(prepare_plan_counts(config));
    const auto weight = workload(rng, kind, ranks, experts);
    const double scale = pick(rng, {1, 10, 100, 2000});
    std::vector<int32_t> host_counts(static_cast<size_t>(ranks) * experts);
    for (size_t j = 0; j < host_counts.size(); ++j) {
      host_counts[j] = static_cast<int32_t>(weight[j] * scale * (rng() % 1024) / 512);
    }
    const bool with_table = rng() % 4 == 0;
    const std::vector<int32_t> table = random_table(rng, config, host_counts);
    const CorePlan want(config, host_counts, with_table ? table.data() : nullptr);
    broadcasts_seen += want.num_broadcasts;
    above_32 += want.num_broadcasts > 32 && want.num_broadcasts <= 64;
    above_64 += want.num_broadcasts > 64;
    counts.put(host_counts);
    resident.put(table);
    for (DeviceArray<int32_t>* array : {&broadcasts, &quota, &load_before, &load, &scalars}) {
      array->fill(0x7b);
    }
    const PlanView view{reinterpret_cast<Broadcast*>(broadcasts.data),
                        quota.data,
                        load_before.data,
                        load.data,
                        scalars.data,
                        scalars.data + 1};
    CHECK_CUDA(launch_plan_counts(
        {config, counts.data, with_table ? resident.data : nullptr, view, hash.data, nullptr}, 0));
    CHECK_CUDA(cudaDeviceSynchronize());
    const auto got = scalars.get();
    auto got_broadcasts = broadcasts.get(), got_quota = quota.get();
    got_broadcasts.resize(rows * 6);
    got_quota.resize(static_cast<size_t>(rows) * ranks);
    std::string why = compare_plan(config, want, got_broadcasts, got_quota, load_before.get(),
                                   load.get(), got[0]);
    if (why.empty()) why = first_difference("target", &got[1], &want.target, 1);
    const uint64_t got_hash = hash.get()[0];
    if (why.empty()) why = first_difference("hash", &got_hash, &want.hash, 1);
    if (!why.empty() && bad++ == 0) {
      first_bad = "case " + std::to_string(i) + " (" + describe(config) + "): " + why;
    }
  }
  if (bad > 0) first_bad = std::to_string(bad) + " differ; first " + first_bad;
  // Groups of an odd number of ranks are all of them: a broadcast takes a slot of every rank.
  const bool is_crowded = ranks >= 16 && ranks % 8 == 0 && cases >= 500;
  if (bad == 0 && is_crowded && (above_32 == 0 || above_64 == 0)) first_bad = "none are crowded";
  report("counts P=" + std::to_string(ranks) + ", " + std::to_string(cases) + " cases, " +
             std::to_string(broadcasts_seen) + " broadcasts, above 32 in " +
             std::to_string(above_32) + " and above 64 in " + std::to_string(above_64),
         first_bad);
}

struct HostTables {  // resident slot tables, by bank
  std::vector<int32_t> version;
  std::vector<std::vector<int32_t>> expert;
};

// One call on all devices, compared with the core.
std::string check_call(TestDomain& domain, std::mt19937& rng, int kind, uint32_t generation,
                       HostTables& tables) {
  const PlanConfig& config = domain.sizes.config;
  const SlotSpace& slots = config.slots;
  const int32_t num_tokens =
      rng() % 5 ? domain.sizes.max_tokens : std::min<int32_t>(rng() % 9, domain.sizes.max_tokens);
  const size_t routes = static_cast<size_t>(num_tokens) * domain.sizes.top_k;
  const auto ids = draw_ids(rng, kind, config, routes);
  const int32_t layer = rng() % 4, version = rng() % 8 == 0;
  const bool is_balanced = rng() % 8 != 0, is_plan_only = rng() % 2;
  for (size_t d = 0; d < domain.devices.size(); ++d) {
    CHECK_CUDA(cudaSetDevice(domain.devices[d]->gpu));
    std::vector<int32_t> all;
    for (int32_t v = 0; v < domain.num_local; ++v) {
      const auto& own = ids[d * domain.num_local + v];
      all.insert(all.end(), own.begin(), own.end());
    }
    domain.devices[d]->topk_ids.put(all);
    domain.devices[d]->set_params({layer, version, is_balanced});
    domain.devices[d]->poison();
    CHECK_CUDA(cudaDeviceSynchronize());
  }
  for (size_t d = 0; d < domain.devices.size(); ++d) {
    PlanLaunch call = domain.launch(d, num_tokens);
    call.is_plan_only = is_plan_only;
    domain.run(d, call);
  }
  domain.sync();

  const std::vector<int32_t> counts = count_ids(config, ids);
  PlanConfig effective = config;
  if (!is_balanced) effective.gain_threshold = INT32_MAX;
  const int32_t bank = layer % domain.sizes.num_banks;
  const bool holds = domain.sizes.resident && tables.version[bank] == version;
  const CorePlan want(effective, counts, holds ? tables.expert[bank].data() : nullptr);
  if (domain.sizes.resident && !is_plan_only) {
    if (tables.version[bank] != version) {
      std::fill(tables.expert[bank].begin(), tables.expert[bank].end(), -1);
      tables.version[bank] = version;
    }
    for (int32_t b = 0; b < want.num_broadcasts; ++b) {
      const Group group = want.broadcasts[b].group(slots.num_ranks);
      for (int32_t r = group.begin; r < group.end; ++r) {
        tables.expert[bank][r * slots.num_helper_slots + want.broadcasts[b].helper_idx] =
            want.broadcasts[b].expert;
      }
    }
  }

  std::string why;
  const auto check = [&](const char* what, const auto* got, const auto* expected, size_t count) {
    if (why.empty()) why = first_difference(what, got, expected, count);
  };
  for (size_t d = 0; d < domain.devices.size() && why.empty(); ++d) {
    const TestDevice& device = *domain.devices[d];
    CHECK_CUDA(cudaSetDevice(device.gpu));
    const auto scalars = device.scalars.get();
    const int32_t ok = 0;
    check("status", &scalars[1], &ok, 1);
    const auto found = static_cast<uint32_t>(scalars[2]);
    check("generation", &found, &generation, 1);
    if (why.empty()) {
      why = compare_plan(config, want, device.broadcasts.get(), device.quota.get(),
                         device.load_before.get(), device.load.get(), scalars[0]);
    }
    const auto route_slot = device.route_slot.get();
    for (int32_t v = 0; v < domain.num_local && why.empty(); ++v) {
      const int32_t rank = d * domain.num_local + v;
      const CoreRoutes core(config, want, counts, ids[rank].data(), routes, rank);
      check("route_slot", route_slot.data() + v * routes, core.route_slot.data(), routes);
      const auto block = domain.block(rank);
      const auto section = [&](Section s) {
        return reinterpret_cast<const int32_t*>(block.data() +
                                                domain.layout.offset[static_cast<int>(s)]);
      };
      check("send starts", section(Section::kSendStarts), core.starts.data(), core.starts.size());
      check("send routes", section(Section::kSendRoutes), core.send.data(), core.send.size());
      const auto* words = reinterpret_cast<const RankWords*>(block.data());
      check("plan_hash", &words->plan_hash, &want.hash, 1);
      for (int s = 0; s < kNumSections && why.empty(); ++s) {
        for (size_t i = 0; i < kGuardBytes; ++i) {
          if (block[domain.layout.guard(s) + i] != kGuardByte) {
            why = std::string("guard behind ") + section_name(static_cast<Section>(s));
          }
        }
      }
      if (!why.empty()) why += " (rank " + std::to_string(rank) + ")";
    }
  }
  return why;
}

// Two launches that wait for each other on one GPU: small ones, not gang-scheduled.
void share_gpu(TestDomain& domain) {
  for (const auto& device : domain.devices) device->grid.is_cooperative = false;
}

// The whole op, several calls on one Domain.
void test_op(int32_t ranks, int32_t domains, int32_t num_devices, const std::vector<int>& gpus) {
  std::mt19937 rng(base_seed * 7919 + ranks * 31 + num_devices);
  int32_t calls = 0, bad = 0;
  std::string first_bad;
  const bool is_one_gpu = num_devices > 1 && gpus.front() == gpus.back();
  for (int32_t i = 0; i < domains; ++i) {
    TestSizes sizes{};
    sizes.config = random_config(rng, ranks);
    sizes.top_k = 1 + rng() % 8;
    sizes.max_tokens = 1 + rng() % (is_small ? 40 : 700);
    sizes.num_devices = num_devices;
    sizes.resident = rng() % 2;
    // Shares of one GPU must be resident together.
    sizes.max_ctas_per_rank = std::min(pick(rng, {1, 2, 4, 8}), std::max(1, 64 / ranks));
    TestDomain domain(sizes, gpus);
    if (is_one_gpu) share_gpu(domain);
    HostTables tables{
        std::vector<int32_t>(sizes.num_banks, -1),
        std::vector<std::vector<int32_t>>(sizes.num_banks,
                                          std::vector<int32_t>(sizes.config.max_broadcasts(), -1))};
    const uint32_t first = i % 2 ? 0u - 2 : 1;  // half of them wrap around
    if (first != 1) domain.begin_at(first);
    for (int call = 0; call < 4; ++call) {
      const uint32_t generation = first + call;
      const std::string why = check_call(domain, rng, (i + call) % 10, generation, tables);
      ++calls;
      if (!why.empty() && bad++ == 0) {
        first_bad = "domain " + std::to_string(i) + " generation " + std::to_string(generation) +
                    " (" + describe(sizes.config) + " K=" + std::to_string(sizes.top_k) +
                    " tokens=" + std::to_string(sizes.max_tokens) +
                    " ctas=" + std::to_string(domain.devices[0]->grid.ctas_per_rank) +
                    " resident=" + std::to_string(sizes.resident) + "): " + why;
      }
      if (!why.empty()) break;
    }
    if (bad >= 3) break;
  }
  report("op P=" + std::to_string(ranks) + " devices=" + std::to_string(num_devices) +
             " gpus=" + std::to_string(gpus.back() + 1) + ", " + std::to_string(calls) + " calls",
         bad == 0 ? "" : std::to_string(bad) + " differ; first " + first_bad);
}

TestSizes small_sizes(int32_t ranks, int32_t num_devices) {
  TestSizes sizes{};
  sizes.config = {{ranks, ranks * 8, 3}, 4, 0, 0, CopyRule::kPerSlot};
  sizes.top_k = 4;
  sizes.max_tokens = 64;
  sizes.num_devices = num_devices;
  sizes.max_ctas_per_rank = 2;
  return sizes;
}

void fill_ids(TestDomain& domain) {
  std::mt19937 rng(base_seed);
  for (const auto& device : domain.devices) {
    std::vector<int32_t> ids(device->topk_ids.count);
    for (int32_t& id : ids) id = rng() % domain.sizes.config.slots.num_experts;
    CHECK_CUDA(cudaSetDevice(device->gpu));
    device->topk_ids.put(ids);
  }
}

// One device never launches: its peer gives up at the limit and says who is missing.
void test_absent_device() {
  TestSizes sizes = small_sizes(8, 2);
  sizes.timeout_ns = 200'000'000;
  TestDomain domain(sizes, {0, 0});
  share_gpu(domain);
  fill_ids(domain);
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  CHECK_CUDA(cudaEventRecord(begin, domain.devices[0]->stream));
  domain.run(0, domain.launch(0, 64));
  CHECK_CUDA(cudaEventRecord(end, domain.devices[0]->stream));
  domain.sync();
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
  std::string why;
  for (int32_t d = 0; d < 2; ++d) {
    const ProcessWords words = domain.words(d);
    if (words.aborted != 1) why = "abort cell not set";
    const ErrorWord& e = words.error;
    if (e.code != static_cast<int32_t>(ErrorCode::kTimeout) || e.peer != 4 || e.generation != 1 ||
        e.stage != 0 || e.rank < 0 || e.rank > 3 || e.expected != 200) {
      why = "error word is code " + std::to_string(e.code) + " rank " + std::to_string(e.rank) +
            " peer " + std::to_string(e.peer) + " stage " + std::to_string(e.stage);
    }
  }
  const auto scalars = domain.devices[0]->scalars.get();
  if (scalars[1] != static_cast<int32_t>(ErrorCode::kTimeout)) why = "status is not timeout";
  for (int32_t slot : domain.devices[0]->route_slot.get()) {
    if (slot != -1) why = "route_slot of a failed call is " + std::to_string(slot);
  }
  if (ms < 195 || ms > 300) why = "took " + std::to_string(ms) + " ms";
  // The late one learns it at once.
  CHECK_CUDA(cudaEventRecord(begin, domain.devices[1]->stream));
  domain.run(1, domain.launch(1, 64));
  CHECK_CUDA(cudaEventRecord(end, domain.devices[1]->stream));
  domain.sync();
  float late_ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&late_ms, begin, end));
  if (domain.devices[1]->scalars.get()[1] != static_cast<int32_t>(ErrorCode::kTimeout)) {
    why = "the late device did not learn of the failure";
  }
  if (late_ms > 20) why = "the late device took " + std::to_string(late_ms) + " ms";
  report("absent device: gave up after " + std::to_string(ms) + " ms", why);
}

void test_other_call() {
  TestDomain domain(small_sizes(8, 2), {0, 0});
  share_gpu(domain);
  fill_ids(domain);
  domain.devices[1]->set_params({5, 0, 1});
  for (int32_t d = 0; d < 2; ++d) domain.run(d, domain.launch(d, 64));
  domain.sync();
  std::string why;
  const ErrorWord e = domain.words(0).error;
  if (e.code != static_cast<int32_t>(ErrorCode::kCallMismatch)) {
    why = "code is " + std::to_string(e.code);
  }
  for (int32_t d = 0; d < 2; ++d) {
    if (domain.devices[d]->scalars.get()[1] != static_cast<int32_t>(ErrorCode::kCallMismatch)) {
      why = "status is not call mismatch";
    }
  }
  report("ranks in different calls", why);
}

// A cell without a Domain: the outputs say so, and nothing else is touched.
void test_no_domain() {
  TestDomain domain(small_sizes(8, 1), {0});
  TestDevice& device = *domain.devices[0];
  device.cell.put({{nullptr, {0, 0, 1}}});
  PlanLaunch call = domain.launch(0, 64);
  call.topk_ids = device.topk_ids.data;
  call.outputs = device.outputs();
  domain.run(0, call);
  domain.sync();
  const auto scalars = device.scalars.get();
  std::string why;
  if (scalars[0] != 0 || scalars[1] != static_cast<int32_t>(ErrorCode::kBadHandle)) {
    why = "broadcasts " + std::to_string(scalars[0]) + ", status " + std::to_string(scalars[1]);
  }
  for (int32_t slot : device.route_slot.get()) {
    if (slot != -1) why = "route_slot is " + std::to_string(slot);
  }
  report("a cell without a Domain", why);
}

// A rank that arrives late, within the limit: the same plan.
void test_late_rank() {
  TestDomain domain(small_sizes(8, 2), {0, 0});
  share_gpu(domain);
  fill_ids(domain);
  std::vector<std::vector<int32_t>> plans;
  for (const uint64_t late_ns : {uint64_t{0}, uint64_t{100'000'000}}) {
    domain.devices[1]->stalls.put({late_ns});  // rank 4, at the counts
    for (int32_t d = 0; d < 2; ++d) domain.run(d, domain.launch(d, 64));
    domain.sync();
    for (int32_t d = 0; d < 2; ++d) plans.push_back(domain.devices[d]->broadcasts.get());
  }
  std::string why;
  for (const auto& plan : plans) {
    if (plan != plans[0]) why = "plans differ";
  }
  if (domain.words(0).aborted != 0) why = "failed";
  report("a rank 100 ms late", why);
}

// A captured launch counts its generations itself.
void test_replay() {
  TestDomain domain(small_sizes(8, 1), {0});
  fill_ids(domain);
  TestDevice& device = *domain.devices[0];
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 3; ++i) domain.run(0, domain.launch(0, 64));
  CHECK_CUDA(cudaStreamEndCapture(device.stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 5; ++i) CHECK_CUDA(cudaGraphLaunch(exec, device.stream));
  domain.sync();
  const auto scalars = device.scalars.get();
  std::string why;
  if (scalars[1] != 0 || scalars[2] != 15) {
    why = "status " + std::to_string(scalars[1]) + ", generation " + std::to_string(scalars[2]);
  }
  report("captured and replayed, 15 generations", why);
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
}

void test_refusals() {
  PlanGrid grid;
  PlanConfig config{{8, 8 * 129, 3}, 4, 0, 0, CopyRule::kPerSlot};
  std::string why;
  if (prepare_plan(config, 8, 1000, 8, &grid) != cudaErrorInvalidValue) why = "E=1032 taken";
  config.slots = {8, 64, 17};
  if (prepare_plan(config, 8, 1000, 8, &grid) != cudaErrorInvalidValue) why = "S=17 taken";
  config.slots = {8, 64, 4};
  if (prepare_plan(config, 500, 1000, 1, &grid) == cudaSuccess) why = "500 ranks a device taken";
  TestDomain domain(small_sizes(8, 1), {0});
  if (launch_plan(domain.devices[0]->grid, domain.launch(0, 65), 0) != cudaErrorInvalidValue) {
    why = "more tokens than the Domain holds were taken";
  }
  report("sizes beyond the kernel are refused", why);
}

}  // namespace

int main(int argc, char** argv) {
  int gpus = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--small") is_small = true;
    if (arg == "--gpus" && i + 1 < argc) gpus = std::atoi(argv[++i]);
    if (arg == "--seed" && i + 1 < argc) base_seed = std::atoi(argv[++i]);
    if (arg == "--plant" && i + 1 < argc) return plant(argv[++i]);
  }
  CHECK_CUDA(cudaSetDevice(0));
  test_refusals();
  for (int32_t ranks : {2, 4, 8, 16, 17, 24, 31, 32, 33, 72}) {
    test_counts(ranks, is_small ? 6 : 1000);
  }
  for (int32_t ranks : {1, 2, 4, 8, 16, 24, 32, 33, 72}) test_op(ranks, is_small ? 1 : 40, 1, {0});
  if (!is_small) {
    for (int32_t ranks : {2, 8, 24}) test_op(ranks, 20, 2, {0, 0});
    test_absent_device();
    test_other_call();
    test_no_domain();
    test_late_rank();
    test_replay();
  }
  if (gpus >= 2) {
    for (int32_t d = 0; d < 2; ++d) {
      CHECK_CUDA(cudaSetDevice(d));
      CHECK_CUDA(cudaDeviceEnablePeerAccess(1 - d, 0));
    }
    for (int32_t ranks : {2, 4, 8, 16}) test_op(ranks, 40, 2, {0, 1});
  }
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 ? 0 : 1;
}
