// replication on GPUs: replicas equal their experts to the byte and nothing else is written, over
// random plans, both copy rules, both banks, planes of any size; READY on every rank; missing
// peers.
//
//   test_replication [--small] [--gpus N] [--plant memcheck|racecheck]
#include <algorithm>
#include <random>
#include <string>

#include "replication_world.cuh"
#include "tests/cuda/plant.cuh"

namespace iser::cuda {
namespace {

int num_passed = 0, num_failed = 0;

void report(const std::string& name, const std::string& error) {
  (error.empty() ? num_passed : num_failed) += 1;
  std::printf("%s %s%s%s\n", error.empty() ? "ok  " : "FAIL", name.c_str(),
              error.empty() ? "" : ": ", error.c_str());
}

constexpr uint64_t kLongNs = 20'000'000'000, kShortNs = 50'000'000;
constexpr uint8_t kPoison = 0xCD;

DomainShape world_shape(int ranks, int experts, int slots, int hidden, int intermediate,
                        int bytes) {
  return make_shape({ranks, experts, slots}, 2, hidden, intermediate, 4, bytes, 2);
}

std::vector<uint8_t> random_bytes(size_t count, std::mt19937_64& random) {
  std::vector<uint8_t> bytes(count + 8);
  for (size_t i = 0; i < count; i += 8) {
    const uint64_t word = random();
    std::memcpy(&bytes[i], &word, 8);
  }
  bytes.resize(count);
  return bytes;
}

// HALO-Q's plan for routing that favours a few experts; some rows are made resident.
std::vector<Broadcast> random_plan(const DomainShape& shape, CopyRule rule, bool with_resident,
                                   std::mt19937_64& random) {
  constexpr int32_t kMinGroup[] = {1, 2, 4};
  const PlanConfig config{shape.slots, kMinGroup[random() % 3], 0, 0, rule};
  const int ranks = shape.slots.num_ranks, experts = shape.slots.num_experts;
  std::vector<int32_t> counts(ranks * experts), quota(config.max_broadcasts() * ranks),
      before(ranks), load(ranks);
  for (int i = 0; i < ranks * experts; ++i) {
    counts[i] = random() % 64 + (i % experts * 7919 % 11 == 0 ? random() % 1000 : 0);
  }
  std::vector<Broadcast> rows(config.max_broadcasts());
  std::vector<int64_t> scratch(plan_scratch_bytes(config) / 8 + 1);
  int32_t count = 0, target = 0;
  plan_counts(config, counts.data(), nullptr, plan_scratch(config, scratch.data()),
              {rows.data(), quota.data(), before.data(), load.data(), &count, &target});
  rows.resize(count);
  for (Broadcast& row : rows) {
    if (with_resident && random() % 4 == 0) row.how = static_cast<int32_t>(CopyWay::kResident);
  }
  return rows;
}

// The image of a block: poison, with a replica wherever one must land.
std::vector<uint8_t> expected_block(const World& world, int rank, int bank,
                                    const std::vector<Broadcast>& rows,
                                    const std::vector<std::vector<uint8_t>>& weights) {
  const DomainShape& shape = world.shape;
  const BundleLayout& bundle = world.layout.bundle;
  std::vector<uint8_t> image(world.layout.total, kPoison);
  const BlockView block{image.data(), &world.layout};
  for (const Broadcast& row : rows) {
    const bool lands = row.how != static_cast<int32_t>(CopyWay::kResident) &&
                       row.group(shape.slots.num_ranks).contains(rank) && rank != row.owner;
    for (int i = 0; i < bundle.num_planes && lands; ++i) {
      const PlaneLayout& plane = bundle.planes[i];
      std::memcpy(block.helper(shape, bank, row.helper_idx) + plane.offset,
                  &weights[bundle.num_planes * row.owner + i]
                          [row.expert % shape.slots.num_home() * plane.bytes],
                  plane.bytes);
    }
  }
  return image;
}

std::string compare_blocks(const World& world, int bank, const std::vector<Broadcast>& rows,
                           const std::vector<std::vector<uint8_t>>& weights) {
  std::vector<uint8_t> found(world.layout.total);
  const size_t begin = world.layout.offset[static_cast<int>(Section::kCounts)];
  for (int r = 0; r < world.shape.slots.num_ranks; ++r) {
    const std::vector<uint8_t> wanted = expected_block(world, r, bank, rows, weights);
    CHECK_CUDA(cudaMemcpy(found.data(), world.block(r).base, found.size(), cudaMemcpyDefault));
    const auto at = std::mismatch(wanted.begin() + begin, wanted.end(), found.begin() + begin);
    if (at.first == wanted.end()) continue;
    const size_t offset = at.first - wanted.begin();
    return "rank " + std::to_string(r) + ", byte " +
           std::to_string(static_cast<int64_t>(
               offset - world.layout.offset[static_cast<int>(Section::kBanks)])) +
           " of the banks: expected " + std::to_string(*at.first) + ", found " +
           std::to_string(*at.second);
  }
  return "";
}

std::string check_ready(const World& world, uint32_t generation) {
  const int index = static_cast<int>(Stage::kReady), ranks = world.shape.slots.num_ranks;
  for (int d = 0; d < world.num_devices; ++d) {
    const ProcessWords words = World::get(&world.head(d)->words);
    if (words.aborted) return "device " + std::to_string(d) + " has failed";
    if (words.arrivals[index] != generation * ranks) {
      return "device " + std::to_string(d) + ": " + std::to_string(words.arrivals[index]) +
             " arrivals at READY, expected " + std::to_string(generation * ranks);
    }
  }
  for (int r = 0; r < ranks; ++r) {
    if (World::get(&world.block(r).words()->arrived[index]) != generation) {
      return "rank " + std::to_string(r) + " has not marked READY";
    }
  }
  return "";
}

void poison(const World& world) {
  const size_t begin = world.layout.offset[static_cast<int>(Section::kCounts)];
  for (int r = 0; r < world.shape.slots.num_ranks; ++r) {
    CHECK_CUDA(cudaSetDevice(world.gpu(r / world.ranks_per_device)));
    CHECK_CUDA(cudaMemset(world.block(r).base + begin, kPoison, world.layout.total - begin));
    CHECK_CUDA(cudaDeviceSynchronize());
  }
}

std::vector<std::vector<uint8_t>> fill_weights(const World& world, std::mt19937_64& random) {
  std::vector<std::vector<uint8_t>> weights;
  const BundleLayout& bundle = world.layout.bundle;
  for (int r = 0; r < world.shape.slots.num_ranks; ++r) {
    for (int i = 0; i < bundle.num_planes; ++i) {
      const size_t bytes = world.shape.slots.num_home() * bundle.planes[i].bytes;
      weights.push_back(random_bytes(bytes, random));
      CHECK_CUDA(cudaMemcpy(world.weights(r, i), weights.back().data(), bytes, cudaMemcpyDefault));
    }
  }
  return weights;
}

void copy_all(const World& world, const ReplicationOptions& options) {
  for (int d = 0; d < world.num_devices; ++d) world.replicate(d, options);
  for (int d = 0; d < world.num_devices; ++d) world.gate(d);
  world.synchronize();
}

ReplicationOptions random_options(const DomainShape& shape, std::mt19937_64& random) {
  constexpr int32_t kSlices[] = {128, 1024, 4096, 16384}, kCtas[] = {1, 2, 3, 8, 16};
  ReplicationOptions options;
  do {
    options.num_ctas = kCtas[random() % 5];
    options.slice_bytes = kSlices[random() % 4];
    options.num_stages = 3 + random() % 8;
    options.cluster_size = 1 << random() % 3;
  } while (replication_options_error(shape, options));
  return options;
}

// Several plans one after the other on the same Domain: generations, layers and so banks change.
void test_random_plans(const DomainShape& shape, int num_devices, int gpus, int num_plans) {
  const int ranks = shape.slots.num_ranks;
  std::mt19937_64 random(ranks * 1000 + num_devices * 100 + shape.bundle_bytes());
  World world(shape, num_devices, gpus, kLongNs);
  const auto weights = fill_weights(world, random);
  std::string error;
  int num_rows = 0;
  for (int g = 1; g <= num_plans && error.empty(); ++g) {
    const auto rule = static_cast<CopyRule>(g % 3);
    const int32_t layer = random() % 5;
    const auto rows = random_plan(shape, rule, g % 4 == 0, random);
    num_rows += rows.size();
    poison(world);
    world.set_plan(g, layer, rows, 17 * g);
    copy_all(world, random_options(shape, random));
    error = compare_blocks(world, layer % shape.num_banks, rows, weights);
    if (error.empty()) error = check_ready(world, g);
    if (!error.empty()) error = "plan " + std::to_string(g) + ": " + error;
  }
  if (error.empty() && num_rows == 0) error = "no plan had a broadcast";
  report("P=" + std::to_string(ranks) + " devices=" + std::to_string(num_devices) +
             " gpus=" + std::to_string(std::min(gpus, num_devices)) +
             " bundle=" + std::to_string(shape.bundle_bytes()) +
             " plans=" + std::to_string(num_plans) + " broadcasts=" + std::to_string(num_rows),
         error);
}

// A peer that never copies: the gate ends at its limit, everybody learns who is missing, and a
// failed Domain neither copies nor arrives.
void test_missing_peer(int gpus) {
  const DomainShape shape = world_shape(4, 16, 2, 64, 32, 2);
  std::mt19937_64 random(4);
  World world(shape, 2, gpus, kShortNs);
  const auto weights = fill_weights(world, random);
  poison(world);
  world.set_plan(1, 3, {}, 5);
  world.replicate(0, {});
  world.gate(0);
  world.synchronize();
  std::string error;
  for (int d = 0; d < 2; ++d) {
    const ProcessWords words = World::get(&world.head(d)->words);
    const ErrorWord& e = words.error;
    if (words.aborted != 1 || e.code != static_cast<int32_t>(ErrorCode::kTimeout) || e.rank != 0 ||
        e.peer != 2 || e.layer != 3 || e.stage != static_cast<int32_t>(Stage::kReady) ||
        e.generation != 1) {
      error = "device " + std::to_string(d) + ": aborted " + std::to_string(words.aborted) +
              ", code " + std::to_string(e.code) + ", rank " + std::to_string(e.rank) + ", peer " +
              std::to_string(e.peer);
    }
  }
  report("a missing peer ends the gate at its limit", error);

  world.set_plan(2, 3, random_plan(shape, CopyRule::kSami, false, random), 5);
  for (int d = 0; d < 2; ++d) world.replicate(d, {});
  world.synchronize();
  error = compare_blocks(world, 1, {}, weights);
  const uint32_t arrivals = World::get(&world.head(0)->words).arrivals[3];
  if (error.empty() && arrivals != 2) {
    error = "a failed Domain arrived: " + std::to_string(arrivals) + " arrivals";
  }
  report("a failed Domain copies nothing", error);
}

void test_other_plan(int gpus) {
  World world(world_shape(4, 16, 2, 64, 32, 2), 2, gpus, kLongNs);
  world.set_plan(1, 2, {}, 5);
  World::set(&world.block(3).words()->plan_hash, uint64_t{6});
  copy_all(world, {});
  const ErrorWord e = World::get(&world.head(1)->words).error;
  const bool is_told = e.code == static_cast<int32_t>(ErrorCode::kPlanMismatch) && e.layer == 2;
  report("ranks with different plans fail", is_told ? "" : "code " + std::to_string(e.code));
}

// Captured once, replayed for other generations, layers and plans.
void test_graph() {
  const DomainShape shape = world_shape(6, 18, 3, 96, 32, 2);
  std::mt19937_64 random(6);
  World world(shape, 1, 1, kLongNs);
  const auto weights = fill_weights(world, random);
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  CHECK_CUDA(cudaSetDevice(0));
  CHECK_CUDA(cudaStreamBeginCapture(world.stream(0), cudaStreamCaptureModeThreadLocal));
  world.replicate(0, {});
  world.gate(0);
  CHECK_CUDA(cudaStreamEndCapture(world.stream(0), &graph));
  CHECK_CUDA(cudaGraphInstantiate(&executable, graph, 0));
  std::string error;
  for (int g = 1; g <= 5 && error.empty(); ++g) {
    const auto rows = random_plan(shape, CopyRule::kPerSlot, false, random);
    poison(world);
    world.set_plan(g, g, rows, g);
    CHECK_CUDA(cudaGraphLaunch(executable, world.stream(0)));
    world.synchronize();
    error = compare_blocks(world, g % 2, rows, weights);
    if (error.empty()) error = check_ready(world, g);
  }
  CHECK_CUDA(cudaGraphExecDestroy(executable));
  CHECK_CUDA(cudaGraphDestroy(graph));
  report("a captured graph replays other plans", error);
}

void test_options() {
  const DomainShape shape = world_shape(8, 64, 3, 7168, 3072, 2);
  struct Case {
    const char* name;
    ReplicationOptions options;
    bool is_good;
  };
  const Case cases[] = {{"defaults", {}, true},
                        {"no CTA", {0, 6, 16384, 1}, false},
                        {"two stages", {8, 2, 16384, 1}, false},
                        {"slices of 100 bytes", {8, 6, 100, 1}, false},
                        {"clusters of 3 in 8 CTAs", {8, 6, 16384, 3}, false},
                        {"256 KiB of stages", {8, 8, 16384, 1}, false}};
  for (const Case& c : cases) {
    const bool is_taken = replication_options_error(shape, c.options) == nullptr;
    report(std::string("options: ") + c.name, is_taken == c.is_good ? "" : "wrong answer");
  }
}

void test_all(bool is_small, int gpus) {
  const int plans = is_small ? 3 : 12;
  prepare_gpus(gpus);
  test_options();
  for (int ranks = 2; ranks <= 8; ++ranks) {
    const DomainShape even = world_shape(ranks, ranks * 6, 1 + ranks % 4, 96, 40 + 8 * ranks, 2);
    test_random_plans(even, 1, gpus, plans);
    test_random_plans(even, ranks, 1, plans);
    if (gpus > 1 && ranks % 2 == 0) test_random_plans(even, 2, gpus, plans);
  }
  // Planes of 70, 45 and 4,106 bytes: aligned for the copy engine rarely or never.
  test_random_plans(world_shape(4, 12, 3, 7, 5, 2), 2, gpus, plans);
  DomainShape with_biases = world_shape(6, 24, 2, 9, 5, 2);
  with_biases.has_biases = true;
  test_random_plans(with_biases, 3, gpus, plans);
  test_random_plans(world_shape(8, 32, 3, 2053, 1, 2), 2, gpus, plans);
  // Slices do not divide the plane, and a ring goes round many times.
  test_random_plans(world_shape(8, 16, 4, 1000, 333, 2), 1, gpus, is_small ? 1 : 4);
  test_random_plans(world_shape(72, 144, 3, 64, 24, 2), 1, gpus, is_small ? 1 : 6);
  test_random_plans(world_shape(72, 144, 3, 64, 24, 2), 2, gpus, is_small ? 1 : 6);
  test_random_plans(world_shape(33, 99, 4, 64, 24, 2), 1, gpus, is_small ? 1 : 6);
  test_missing_peer(gpus);
  test_other_plan(gpus);
  test_graph();
}

}  // namespace
}  // namespace iser::cuda

int main(int argc, char** argv) {
  bool is_small = false;
  int gpus = 1;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const bool has_value = i + 1 < argc;
    if (word == "--small") {
      is_small = true;
    } else if (word == "--gpus" && has_value) {
      gpus = std::min(std::atoi(argv[++i]), iser::cuda::num_gpus());
    } else if (word == "--plant" && has_value) {
      return iser::cuda::plant(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  iser::cuda::test_all(is_small, gpus);
  std::printf("%d passed, %d failed\n", iser::cuda::num_passed, iser::cuda::num_failed);
  return iser::cuda::num_failed == 0 ? 0 : 1;
}
