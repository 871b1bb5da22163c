// Times the CUDA plan; every plan is checked against the C++ core before it is timed. JSON lines:
//
//   plan_counts  placement and repair alone, one CTA: SM time of each part inside the kernel, the
//                kernel by %globaltimer, and the whole launch as a node of a replayed graph
//   plan         the whole op on one GPU, all ranks in one launch
//   plan_gpus    the whole op over two GPUs
//
//   bench_plan [--gpus N] [--counts-only]
#include <algorithm>
#include <cmath>
#include <memory>
#include <string>

#include "tests/cuda/plan_domain.cuh"

using namespace iser;
using namespace iser::cuda;

namespace {

constexpr int kStamps = static_cast<int>(PlanStamp::kNumStamps);
constexpr int kLayers = 25;    // different popularities
constexpr int kRepeats = 100;  // timed calls a popularity or domain

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// SM clocks a microsecond while something runs.
__global__ void spin(int64_t* out, uint64_t ns) {
  const uint64_t begin_ns = global_ns();
  const int64_t begin = clock64();
  while (global_ns() - begin_ns < ns) {
  }
  out[0] = clock64() - begin;
  out[1] = global_ns() - begin_ns;
}

double clocks_per_us() {
  DeviceArray<int64_t> out(2);
  spin<<<1, 1>>>(out.data, 20'000'000);
  CHECK_CUDA(cudaDeviceSynchronize());
  return 1000.0 * out.get()[0] / out.get()[1];
}

// Microseconds of a node in a graph of `nodes` launches.
template <typename Launch>
double graph_us(cudaStream_t stream, int nodes, Launch launch) {
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < nodes; ++i) launch();
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  std::vector<double> us;
  for (int i = 0; i < 7; ++i) {
    CHECK_CUDA(cudaEventRecord(begin, stream));
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    CHECK_CUDA(cudaEventRecord(end, stream));
    CHECK_CUDA(cudaEventSynchronize(end));
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
    if (i > 0) us.push_back(1000.0 * ms / nodes);
  }
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  return median(us);
}

PlanConfig paper_config(int32_t ranks, int32_t slots) {
  return {{ranks, 384, slots}, 4, 0, 0, CopyRule::kPerSlot};
}

// Counts of 8,192 tokens a rank, 6 experts each; every rank drifts a little.
std::vector<int32_t> paper_counts(int32_t ranks, std::mt19937& rng) {
  const auto share = paper_popularity(384, rng);
  std::normal_distribution<double> drift(0, 0.15);
  std::vector<int32_t> counts;
  for (int32_t r = 0; r < ranks; ++r) {
    std::vector<double> own(share);
    double sum = 0;
    for (double& s : own) sum += s *= std::exp(drift(rng));
    for (double s : own) counts.push_back(std::lround(8192 * 6 * s / sum));
  }
  return counts;
}

void bench_counts(int32_t ranks, int32_t slots, double clocks) {
  const PlanConfig config = paper_config(ranks, slots);
  std::mt19937 rng(7 * ranks + slots);
  cudaStream_t stream;
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  CHECK_CUDA(prepare_plan_counts(config));
  DeviceArray<int32_t> counts(ranks * 384), broadcasts(config.max_broadcasts() * 6),
      quota(config.max_broadcasts() * ranks), loads(2 * ranks), scalars(2);
  DeviceArray<uint64_t> hash(1);
  DeviceArray<int64_t> stamps(kStamps);
  const PlanView view{reinterpret_cast<Broadcast*>(broadcasts.data),
                      quota.data,
                      loads.data,
                      loads.data + ranks,
                      scalars.data,
                      scalars.data + 1};
  std::vector<double> sum, place, repair, both, all, kernel, launch, rows, r_before, r_after;
  for (int layer = 0; layer < kLayers; ++layer) {
    const auto host_counts = paper_counts(ranks, rng);
    counts.put(host_counts);
    const PlanCountsLaunch call{config, counts.data, nullptr, view, hash.data, stamps.data};
    for (int i = 0; i < kRepeats / kLayers + 2; ++i) {
      CHECK_CUDA(launch_plan_counts(call, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      if (i < 2) continue;
      const auto s = stamps.get();
      const auto us = [&](PlanStamp a, PlanStamp b) {
        return (s[static_cast<int>(b)] - s[static_cast<int>(a)]) / clocks;
      };
      sum.push_back(us(PlanStamp::kExchanged, PlanStamp::kSummed));
      place.push_back(us(PlanStamp::kSummed, PlanStamp::kPlaced));
      repair.push_back(us(PlanStamp::kPlaced, PlanStamp::kRepaired));
      both.push_back(us(PlanStamp::kSummed, PlanStamp::kRepaired));
      all.push_back(us(PlanStamp::kExchanged, PlanStamp::kRepaired));
      kernel.push_back(1e-3 * (s[static_cast<int>(PlanStamp::kEndNs)] -
                               s[static_cast<int>(PlanStamp::kStartNs)]));
    }
    const CorePlan want(config, host_counts, nullptr);
    if (hash.get()[0] != want.hash) {
      std::printf("{\"error\": \"plan differs from the core\", \"ranks\": %d}\n", ranks);
      std::exit(1);
    }
    double total = 0;
    for (int32_t l : want.load) total += l;
    rows.push_back(want.num_broadcasts);
    const auto worst = [&](const std::vector<int32_t>& load) {
      return *std::max_element(load.begin(), load.end()) * ranks / total;
    };
    r_before.push_back(worst(want.load_before));
    r_after.push_back(worst(want.load));
    PlanCountsLaunch plain = call;
    plain.stamps = nullptr;
    if (layer % 5 == 0) {
      launch.push_back(
          graph_us(stream, 100, [&] { CHECK_CUDA(launch_plan_counts(plain, stream)); }));
    }
  }
  std::printf(
      "{\"bench\": \"plan_counts\", \"ranks\": %d, \"helper_slots\": %d, \"experts\": 384, "
      "\"ctas\": 1, \"threads\": %d, \"samples\": %zu, \"broadcasts\": %.0f, "
      "\"imbalance_before\": %.3f, \"imbalance_after\": %.3f, \"sums_us\": %.2f, "
      "\"placement_us\": %.2f, \"repair_us\": %.2f, \"placement_and_repair_us\": %.2f, "
      "\"with_sums_us\": %.2f, \"kernel_us\": %.2f, \"launch_us\": %.2f}\n",
      ranks, slots, kPlanThreads, place.size(), median(rows), median(r_before), median(r_after),
      median(sum), median(place), median(repair), median(both), median(all), median(kernel),
      median(launch));
  std::fflush(stdout);
  CHECK_CUDA(cudaStreamDestroy(stream));
}

TestSizes op_sizes(int32_t ranks, int32_t num_devices, int32_t max_ctas) {
  TestSizes sizes{};
  sizes.config = paper_config(ranks, ranks <= 4 ? 4 : 3);
  sizes.top_k = 6;
  sizes.max_tokens = 8192;
  sizes.num_devices = num_devices;
  sizes.max_ctas_per_rank = max_ctas;
  return sizes;
}

// Six different experts a token, by popularity.
std::vector<int32_t> paper_ids(int32_t tokens, const std::vector<double>& share,
                               std::mt19937& rng) {
  std::discrete_distribution<int32_t> draw(share.begin(), share.end());
  std::vector<int32_t> ids;
  for (int32_t t = 0; t < tokens; ++t) {
    const size_t first = ids.size();
    while (ids.size() < first + 6) {
      const int32_t id = draw(rng);
      if (std::find(ids.begin() + first, ids.end(), id) == ids.end()) ids.push_back(id);
    }
  }
  return ids;
}

// Puts routes in place, runs one call and checks it against the core.
void check_domain(TestDomain& domain) {
  const PlanConfig& config = domain.sizes.config;
  const int32_t ranks = config.slots.num_ranks;
  std::mt19937 rng(ranks);
  const auto share = paper_popularity(384, rng);
  std::vector<std::vector<int32_t>> ids;
  std::vector<int32_t> counts(static_cast<size_t>(ranks) * 384, 0);
  for (int32_t r = 0; r < ranks; ++r) {
    ids.push_back(paper_ids(8192, share, rng));
    for (int32_t id : ids[r]) ++counts[r * 384 + id];
  }
  for (size_t d = 0; d < domain.devices.size(); ++d) {
    std::vector<int32_t> all;
    for (int32_t v = 0; v < domain.num_local; ++v) {
      all.insert(all.end(), ids[d * domain.num_local + v].begin(),
                 ids[d * domain.num_local + v].end());
    }
    CHECK_CUDA(cudaSetDevice(domain.devices[d]->gpu));
    domain.devices[d]->topk_ids.put(all);
  }
  for (size_t d = 0; d < domain.devices.size(); ++d) domain.run(d, domain.launch(d, 8192));
  domain.sync();
  const CorePlan want(config, counts, nullptr);
  for (int32_t r = 0; r < ranks; ++r) {
    const auto block = domain.block(r);
    const CoreRoutes core(config, want, counts, ids[r].data(), ids[r].size(), r);
    const TestDevice& device = *domain.devices[r / domain.num_local];
    const auto slots = device.route_slot.get();
    const auto* send = block.data() + domain.layout.offset[static_cast<int>(Section::kSendRoutes)];
    const size_t own = static_cast<size_t>(r % domain.num_local) * core.route_slot.size();
    if (reinterpret_cast<const RankWords*>(block.data())->plan_hash != want.hash ||
        !std::equal(core.route_slot.begin(), core.route_slot.end(), slots.begin() + own) ||
        std::memcmp(send, core.send.data(), core.send.size() * sizeof(int32_t)) != 0) {
      std::printf("{\"error\": \"op differs from the core\", \"ranks\": %d, \"rank\": %d}\n", ranks,
                  r);
      std::exit(1);
    }
  }
}

void bench_op(int32_t ranks, int32_t max_ctas, bool is_cooperative, double clocks) {
  TestDomain domain(op_sizes(ranks, 1, max_ctas), {0});
  TestDevice& device = *domain.devices[0];
  device.grid.is_cooperative = is_cooperative;
  check_domain(domain);
  PlanLaunch call = domain.launch(0, 8192);
  call.is_plan_only = 0;  // as a layer calls it
  const int32_t ctas = ranks * device.grid.ctas_per_rank;
  std::vector<double> span, first_to_last, part[7];
  call.stamps = device.stamps.data;
  for (int i = 0; i < kRepeats + 5; ++i) {
    domain.run(0, call);
    domain.sync();
    if (i < 5) continue;
    const auto s = device.stamps.get();
    int64_t first = INT64_MAX, last_in = 0, last_out = 0;
    std::vector<double> clock[7];
    for (int32_t c = 0; c < ctas; ++c) {
      const int64_t* row = s.data() + c * kStamps;
      first = std::min(first, row[static_cast<int>(PlanStamp::kStartNs)]);
      last_in = std::max(last_in, row[static_cast<int>(PlanStamp::kStartNs)]);
      last_out = std::max(last_out, row[static_cast<int>(PlanStamp::kEndNs)]);
      for (int p = 0; p < 7; ++p) clock[p].push_back((row[p + 1] - row[p]) / clocks);
    }
    span.push_back(1e-3 * (last_out - last_in));
    first_to_last.push_back(1e-3 * (last_out - first));
    for (int p = 0; p < 7; ++p) part[p].push_back(median(clock[p]));
  }
  call.stamps = nullptr;
  const double launch = graph_us(device.stream, 100, [&] { domain.run(0, call); });
  std::printf(
      "{\"bench\": \"plan\", \"ranks\": %d, \"gpus\": 1, \"tokens_per_rank\": 8192, \"top_k\": 6, "
      "\"experts\": 384, \"helper_slots\": %d, \"ctas_per_rank\": %d, \"ctas\": %d, "
      "\"threads\": %d, \"smem_bytes\": %d, \"cooperative\": %s, \"samples\": %zu, "
      "\"last_in_to_last_out_us\": %.2f, \"first_in_to_last_out_us\": %.2f, \"launch_us\": %.2f, "
      "\"histogram_us\": %.2f, \"send_us\": %.2f, \"exchange_us\": %.2f, \"sums_us\": %.2f, "
      "\"placement_us\": %.2f, \"repair_us\": %.2f, \"rewrite_us\": %.2f}\n",
      ranks, domain.sizes.config.slots.num_helper_slots, device.grid.ctas_per_rank, ctas,
      kPlanThreads, device.grid.smem_bytes, is_cooperative ? "true" : "false", span.size(),
      median(span), median(first_to_last), launch, median(part[0]), median(part[1]),
      median(part[2]), median(part[3]), median(part[4]), median(part[5]), median(part[6]));
  std::fflush(stdout);
}

// Two GPUs: launches that wait for each other, back to back, so that a call's time is its share of
// the whole; and each device's own kernel time.
void bench_gpus(int32_t max_ctas, double clocks) {
  TestDomain domain(op_sizes(2, 2, max_ctas), {0, 1});
  check_domain(domain);
  std::vector<double> each, kernel;
  cudaEvent_t begin[2], end[2];
  cudaGraphExec_t exec[2];
  constexpr int kNodes = 100;
  for (int d = 0; d < 2; ++d) {
    const TestDevice& device = *domain.devices[d];
    CHECK_CUDA(cudaSetDevice(d));
    CHECK_CUDA(cudaEventCreate(&begin[d]));
    CHECK_CUDA(cudaEventCreate(&end[d]));
    cudaGraph_t graph;
    CHECK_CUDA(cudaStreamBeginCapture(device.stream, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < kNodes; ++i) {
      PlanLaunch call = domain.launch(d, 8192);
      call.is_plan_only = 0;
      domain.run(d, call);
    }
    CHECK_CUDA(cudaStreamEndCapture(device.stream, &graph));
    CHECK_CUDA(cudaGraphInstantiate(&exec[d], graph, 0));
  }
  for (int i = 0; i < 12; ++i) {
    for (int d = 0; d < 2; ++d) {
      CHECK_CUDA(cudaSetDevice(d));
      CHECK_CUDA(cudaEventRecord(begin[d], domain.devices[d]->stream));
      CHECK_CUDA(cudaGraphLaunch(exec[d], domain.devices[d]->stream));
      CHECK_CUDA(cudaEventRecord(end[d], domain.devices[d]->stream));
    }
    domain.sync();
    if (i < 2) continue;
    float ms[2];
    for (int d = 0; d < 2; ++d) CHECK_CUDA(cudaEventElapsedTime(&ms[d], begin[d], end[d]));
    each.push_back(1000.0 * std::min(ms[0], ms[1]) / kNodes);
  }
  // Stamps of lone calls: the later device's kernel waits for nobody.
  std::vector<double> exchange, shorter;
  for (int i = 0; i < kRepeats + 5; ++i) {
    for (int d = 0; d < 2; ++d) {
      PlanLaunch call = domain.launch(d, 8192);
      call.stamps = domain.devices[d]->stamps.data;
      call.is_plan_only = 0;
      domain.run(d, call);
    }
    domain.sync();
    if (i < 5) continue;
    double span[2], wait[2];
    for (int d = 0; d < 2; ++d) {
      const auto s = domain.devices[d]->stamps.get();
      int64_t first = INT64_MAX, last = 0;
      for (int c = 0; c < domain.devices[d]->grid.ctas_per_rank; ++c) {
        const int64_t* row = s.data() + c * kStamps;
        first = std::min(first, row[static_cast<int>(PlanStamp::kStartNs)]);
        last = std::max(last, row[static_cast<int>(PlanStamp::kEndNs)]);
      }
      span[d] = 1e-3 * (last - first);
      wait[d] =
          (s[static_cast<int>(PlanStamp::kExchanged)] - s[static_cast<int>(PlanStamp::kArrived)]) /
          clocks;
    }
    shorter.push_back(std::min(span[0], span[1]));
    exchange.push_back(std::min(wait[0], wait[1]));
  }
  std::printf(
      "{\"bench\": \"plan_gpus\", \"ranks\": 2, \"gpus\": 2, \"tokens_per_rank\": 8192, "
      "\"top_k\": 6, \"experts\": 384, \"helper_slots\": 4, \"ctas_per_rank\": %d, "
      "\"samples\": %zu, \"last_in_to_last_out_us\": %.2f, \"exchange_us\": %.2f, "
      "\"launch_us\": %.2f}\n",
      domain.devices[0]->grid.ctas_per_rank, shorter.size(), median(shorter), median(exchange),
      median(each));
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  int gpus = 1;
  bool counts_only = false;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--gpus" && i + 1 < argc) gpus = std::atoi(argv[++i]);
    if (arg == "--counts-only") counts_only = true;
  }
  CHECK_CUDA(cudaSetDevice(0));
  const double clocks = clocks_per_us();
  int driver = 0, runtime = 0;
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  CHECK_CUDA(cudaRuntimeGetVersion(&runtime));
  cudaDeviceProp device;
  CHECK_CUDA(cudaGetDeviceProperties(&device, 0));
  std::printf(
      "{\"device\": \"%s\", \"sms\": %d, \"clocks_per_us\": %.1f, \"driver\": %d, "
      "\"runtime\": %d}\n",
      device.name, device.multiProcessorCount, clocks, driver, runtime);
  for (int32_t ranks : {4, 8, 16, 32}) {
    for (int32_t slots : {3, 4}) bench_counts(ranks, slots, clocks);
  }
  if (counts_only) return 0;
  for (int32_t ctas : {1, 4, 8, 16}) bench_op(8, ctas, true, clocks);
  bench_op(8, 8, false, clocks);
  for (int32_t ranks : {1, 4, 16, 32}) bench_op(ranks, 8, true, clocks);
  if (gpus >= 2) {
    for (int32_t d = 0; d < 2; ++d) {
      CHECK_CUDA(cudaSetDevice(d));
      CHECK_CUDA(cudaDeviceEnablePeerAccess(1 - d, 0));
    }
    for (int32_t ctas : {8, 16}) bench_gpus(ctas, clocks);
  }
  return 0;
}
