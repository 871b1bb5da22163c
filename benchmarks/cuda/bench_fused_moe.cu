// The fused MoE layer against dense products of the same run. Prints a JSON object a line. Every
// case is checked against the oracle on its first tokens before it is timed.
//
//   bench_fused_moe [--gpus N] [--model WORD] [--popularity FILE] [dense] [share] [fp8] [ranks]
//   [pair] [products] [epilogues] [tails]     (all by default)
//
// --model: only models with the word in their name. --popularity FILE: how often each expert was
// chosen, numbers in a text, for the skewed cases of that model.
//
// dense: cuBLAS bf16. share: one rank's share of a model, no peers; fp8: the same in FP8. ranks:
// EP8 as 8 ranks of one GPU, each with an eighth of its SMs. pair: EP2 on two GPUs. Arms: "off"
// without replicas, "installed" with replicas and routes made before the clock starts, "included"
// with plan, copy and READY inside it; "balanced" routing (every expert as often) without replicas,
// with them (there are none to make), and with all inside; "uniform" routing by chance, without
// replicas. `ms` are medians of 20 of the slowest device, arms in turn; `tflops` counts 6 D I of
// every routed row of a GPU; `of_dense` is against the best dense product.
//
// products: the share's bf16 products beside cuBLAS's at the same shapes, in turn. Arms: the layer;
// "each expert's", cuBLAS's two products per expert over the rows that the layer gives the expert;
// "one expert's", two products over all rows with one expert's weights, which no layer could use.
// Each round times every arm once, there and back. `tiles_of_cublas` is cuBLAS's time over that of
// the layer's tiles (products with SwiGLU, pulling and storing of rows) in the same round,
// `layer_of_cublas` over the whole layer's: medians of the rounds with the interval of the median
// at 95 %; `rounds_ms` has every round's [cuBLAS, tiles, layer].
//
// epilogues: gpt-oss's layers in bf16 with biases and clamped SwiGLU against the same layers with
// SiLU and no biases, all experts on one GPU. tails: FP8 layers of D = I = 2880, whose last blocks
// are halves, against 3072. The first arm is the base; an arm "again" is the base once more, and
// shows what a difference means. `time_ratio` and `rate_ratio` are medians of the rounds' ratios to
// the base, with their intervals at 95 %; `rounds_ms` has every round's [base, arm].
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <string>

#include "benchmarks/cuda/vendor.h"
#include "tests/cuda/moe_world.cuh"

using namespace iser;
using namespace iser::cuda;

namespace {

constexpr int kRepeats = 20, kWarmUps = 3, kRounds = 4, kCheckedTokens = 16;
constexpr int kPairedRounds = 40;
int num_gpus = 1;
double best_dense = 0;  // TFLOP/s
std::string only_model;
std::vector<double> popularity;  // of experts, recorded; instead of power laws

struct Model {
  const char* name;
  int32_t hidden, intermediate, experts, top_k;
};

constexpr Model kModels[] = {{"DeepSeek-V4-Pro", 7168, 3072, 384, 6},
                             {"V4-Flash-like", 4096, 2048, 256, 6},
                             {"Qwen3-30B-A3B", 2048, 768, 128, 8},
                             {"gpt-oss-20b", 2880, 2880, 32, 4}};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// Every expert as often as every other, or by a power law of its place in an order that is shuffled
// unless `is_sorted`: then the hottest are all rank 0's. By chance alone with an exponent below 0.
std::vector<std::vector<int32_t>> draw(const SlotSpace& slots, int32_t tokens, int32_t top_k,
                                       double exponent, uint32_t seed, bool is_sorted = false) {
  std::mt19937 rng(seed);
  std::vector<double> weight(slots.num_experts);
  for (int32_t e = 0; e < slots.num_experts; ++e) {
    weight[e] = exponent < 0 ? 1 : std::pow(e + 1.0, -exponent);
  }
  if (!popularity.empty() && exponent > 0) {
    for (int32_t e = 0; e < slots.num_experts; ++e) weight[e] = popularity[e % popularity.size()];
  } else if (!is_sorted) {
    std::shuffle(weight.begin(), weight.end(), rng);
  }
  std::discrete_distribution<int32_t> any(weight.begin(), weight.end());
  std::vector<std::vector<int32_t>> ids(slots.num_ranks);
  int32_t next = 0;
  for (auto& of_rank : ids) {
    for (int32_t t = 0; t < tokens; ++t) {
      const size_t first = of_rank.size();
      while (of_rank.size() < first + top_k) {
        const int32_t id = exponent == 0 ? next++ % slots.num_experts : any(rng);
        if (std::find(of_rank.begin() + first, of_rank.end(), id) == of_rank.end()) {
          of_rank.push_back(id);
        }
      }
    }
  }
  return ids;
}

double imbalance(const MoeProblem& p) {
  const std::vector<int32_t> counts = count_ids(p.config(false), p.ids);
  std::vector<double> load(p.slots.num_ranks, 0);
  double total = 0;
  for (size_t i = 0; i < counts.size(); ++i) {
    load[i % p.slots.num_experts / p.slots.num_home()] += counts[i];
    total += counts[i];
  }
  return *std::max_element(load.begin(), load.end()) * load.size() / total;
}

void check(const MoeProblem& p, MoeWorld& world, const MoeRun& run) {
  const std::vector<uint8_t> y = world.call(run);
  std::string why = world.check_state();
  MoeProblem first = p;
  first.num_tokens = std::min(p.num_tokens, kCheckedTokens);
  first.ids = {std::vector<int32_t>(p.ids[0].begin(), p.ids[0].begin() + first.num_routes())};
  if (why.empty()) why = Expected(first, 1).compare(first, y);
  if (why.empty()) return;
  std::fprintf(stderr, "wrong: %s\n", why.c_str());
  std::exit(3);
}

struct Timing {
  double ms;
  std::vector<uint64_t> stamps;  // of device 0, of the last call
  double imbalance_after;        // of its plan
};

// One arm of a benchmark: calls of a world, each between two events.
struct Arm {
  const char* name;
  MoeWorld& world;
  MoeRun run;
  std::vector<cudaEvent_t> begins, ends;
  std::vector<double> times;
  Timing timing{};

  Arm(const char* n, MoeWorld& w, const MoeRun& r)
      : name(n), world(w), run(r), begins(w.devices.size()), ends(w.devices.size()) {
    for (size_t d = 0; d < begins.size(); ++d) {
      CHECK_CUDA(cudaSetDevice(world.devices[d]->gpu));
      CHECK_CUDA(cudaEventCreate(&begins[d]));
      CHECK_CUDA(cudaEventCreate(&ends[d]));
    }
    if (run.by_kernels) run.starts = begins.data();
  }
  Arm(const Arm&) = delete;
  ~Arm() {
    for (size_t d = 0; d < begins.size(); ++d) {
      cudaEventDestroy(begins[d]);
      cudaEventDestroy(ends[d]);
    }
  }

  double call() {  // ms of the slowest device
    // GPUs rest as long before either kind of call.
    static double host_ms = 0;
    const auto began = std::chrono::steady_clock::now();
    run.settle_ms = run.by_kernels ? host_ms : 0;
    world.prepare(run);
    if (!run.by_kernels) {
      world.sync();  // replicas are there, READY has come
      host_ms = MoeWorld::ms_since(began);
    }
    for (size_t d = 0; d < begins.size(); ++d) {
      const MoeDevice& device = *world.devices[d];
      CHECK_CUDA(cudaSetDevice(device.gpu));
      if (!run.by_kernels) {
        spin_kernel<<<1, 1, 0, device.main>>>(kLaunchNs);
        CHECK_CUDA(cudaEventRecord(begins[d], device.main));
      }
      world.fused(d, run);
      CHECK_CUDA(cudaEventRecord(ends[d], device.main));
    }
    world.sync();
    double slowest = 0;
    for (size_t d = 0; d < begins.size(); ++d) {
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, begins[d], ends[d]));
      slowest = std::max<double>(slowest, ms);
    }
    return slowest;
  }

  void finish() {
    const std::string why = world.check_state();
    if (!why.empty()) {
      std::fprintf(stderr, "failed while timed: %s\n", why.c_str());
      std::exit(3);
    }
    const std::vector<int32_t> loads = world.devices[0]->out_loads.get();
    const auto after = loads.begin() + loads.size() / 2;
    const double total = std::accumulate(after, loads.end(), 0.0);
    timing = {median(times), world.devices[0]->stamps.get(),
              *std::max_element(after, loads.end()) * (loads.size() / 2) / std::max(total, 1.0)};
  }
};

// Clocks follow the power of the last calls, and heat that of the last seconds: an arm's calls come
// after others of its own, and arms take turns, every other time backwards.
void time_arms(std::vector<std::unique_ptr<Arm>>& arms) {
  for (int round = 0; round < kRounds; ++round) {
    for (auto& arm : arms) {
      for (int i = 0; i < kWarmUps; ++i) arm->call();
      for (int i = 0; i < kRepeats / kRounds; ++i) arm->times.push_back(arm->call());
      if (round + 1 == kRounds) arm->finish();
    }
    std::reverse(arms.begin(), arms.end());
  }
}

Timing time_calls(MoeWorld& world, const MoeRun& run) {
  std::vector<std::unique_ptr<Arm>> arms;
  arms.push_back(std::make_unique<Arm>("", world, run));
  time_arms(arms);
  return arms.front()->timing;
}

double to_us(const Timing& t, MoeStamp from, MoeStamp to) {
  const uint64_t a = t.stamps[static_cast<int>(from)], b = t.stamps[static_cast<int>(to)];
  return b > a ? (b - a) / 1000.0 : 0;
}

void print(const char* bench, const char* model, const char* arm, const MoeProblem& p,
           int32_t num_devices, const Timing& t) {
  size_t rows = 0;
  for (const auto& ids : p.ids) rows += ids.size();
  const double flops = 6.0 * rows * p.hidden * p.intermediate / num_devices;
  const double tflops = flops / t.ms / 1e9;
  const auto part = [&](MoeStamp stamp) {
    double all = 0;
    for (MoeStamp s : {MoeStamp::kGemmInner, MoeStamp::kGemmHidden, MoeStamp::kIdle}) {
      all += t.stamps[static_cast<int>(s)];
    }
    return all > 0 ? t.stamps[static_cast<int>(stamp)] / all : 0;
  };
  std::printf(
      "{\"bench\": \"%s\", \"model\": \"%s\", \"arm\": \"%s\", \"ranks\": %d, \"devices\": %d, "
      "\"tokens\": %d, \"rows\": %zu, \"imbalance\": %.3f, \"imbalance_after\": %.3f, "
      "\"ms\": %.3f, \"tflops\": %.1f, "
      "\"of_dense\": %.3f, \"dispatch_us\": %.1f, \"schedule_us\": %.1f, \"tiles_us\": %.1f, "
      "\"gate_us\": %.1f, \"combine_us\": %.1f, \"gemm1\": %.3f, \"gemm2\": %.3f, "
      "\"idle\": %.3f, \"wait_rows\": %.4f, \"wait_h\": %.4f, \"wait_ready\": %.4f}\n",
      bench, model, arm, p.slots.num_ranks, num_devices, p.num_tokens, rows, imbalance(p),
      t.imbalance_after, t.ms, tflops, best_dense > 0 ? tflops / best_dense : 0.0,
      to_us(t, MoeStamp::kBeginNs, MoeStamp::kDispatchNs),
      to_us(t, MoeStamp::kDispatchNs, MoeStamp::kExpertsNs),
      to_us(t, MoeStamp::kExpertsNs, MoeStamp::kTilesEndNs),
      to_us(t, MoeStamp::kTilesEndNs, MoeStamp::kGateNs),
      to_us(t, MoeStamp::kGateNs, MoeStamp::kEndNs), part(MoeStamp::kGemmInner),
      part(MoeStamp::kGemmHidden), part(MoeStamp::kIdle), part(MoeStamp::kWaitRows),
      part(MoeStamp::kWaitInner), part(MoeStamp::kWaitReady));
  std::fflush(stdout);
}

void bench_dense() {
  cudaStream_t stream;
  CHECK_CUDA(cudaSetDevice(0));
  CHECK_CUDA(cudaStreamCreate(&stream));
  bench::Cublas cublas;
  if (!cublas.init(stream)) {
    std::printf("{\"skipped\": \"dense\", \"why\": \"no libcublas; set ISER_CUBLAS_LIBRARY\"}\n");
    return;
  }
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  const int shapes[][3] = {
      {8192, 8192, 8192}, {49152, 3072, 7168}, {49152, 6144, 7168}, {49152, 7168, 3072}};
  for (const auto& [m, n, k] : shapes) {
    DeviceArray<uint16_t> a(size_t(m) * k), b(size_t(n) * k), c(size_t(m) * n);
    fill_random(DType::kBF16, a.data, a.count, 1, 0, 1.0f);
    fill_random(DType::kBF16, b.data, b.count, 2, 0, 1.0f / 64);
    CHECK_CUDA(cudaDeviceSynchronize());
    std::vector<double> times;
    for (int i = 0; i < kWarmUps + kRepeats; ++i) {
      CHECK_CUDA(cudaEventRecord(begin, stream));
      if (!cublas.gemm(a.data, b.data, c.data, m, n, k)) return;
      CHECK_CUDA(cudaEventRecord(end, stream));
      CHECK_CUDA(cudaStreamSynchronize(stream));
      float ms = 0;
      CHECK_CUDA(cudaEventElapsedTime(&ms, begin, end));
      if (i >= kWarmUps) times.push_back(ms);
    }
    const double tflops = 2.0 * m * n * k / median(times) / 1e9;
    best_dense = std::max(best_dense, tflops);
    std::printf(
        "{\"bench\": \"dense\", \"m\": %d, \"n\": %d, \"k\": %d, \"ms\": %.3f, \"tflops\": %.1f, "
        "\"cublas\": %d}\n",
        m, n, k, median(times), tflops, cublas.version());
    std::fflush(stdout);
  }
}

// A rank's share of EP8: its experts, and as many rows as balanced routing sends it.
void bench_share(bool is_fp8) {
  for (const Model& model : kModels) {
    if (std::string(model.name).find(only_model) == std::string::npos) continue;
    for (double exponent : {0.0, 0.4}) {
      for (int32_t tokens : {512, 2048, 8192, 16384}) {
        const int32_t experts = model.experts / 8;
        MoeProblem p{{1, experts, 0},
                     std::min(model.top_k, experts),
                     model.hidden,
                     model.intermediate,
                     tokens};
        p.has_fp8_weights = is_fp8;
        p.ids = draw(p.slots, tokens, p.top_k, exponent, 1);
        MoeWorld world(p, 1, 1);
        MoeRun run;
        run.is_balanced = false;
        check(p, world, run);
        const std::string routing = exponent == 0 ? "even" : "skewed";
        const int32_t shapes[][2] = {{0, 0}, {0, 1}, {is_fp8 ? 64 : 128, 0}};
        for (const auto& [rows, cluster_size] : shapes) {
          run.options.tile_rows = rows;
          run.options.cluster_size = cluster_size;
          const std::string arm = routing + (rows > 0 ? ", tiles of " + std::to_string(rows) : "") +
                                  (cluster_size == 1 ? ", no pairs" : "");
          print(is_fp8 ? "share_fp8" : "share", model.name, arm.c_str(), p, 1,
                time_calls(world, run));
        }
      }
    }
  }
}

void bench_arms(const char* bench, const Model& model, const MoeProblem& p, int32_t num_devices) {
  MoeRun off, installed, included;
  off.is_balanced = false;
  included.by_kernels = true;
  for (MoeRun* run : {&off, &installed, &included}) {
    run->max_routes_per_rank = 4 * p.num_routes();  // one wave up to R = 4
  }
  MoeProblem balanced = p, uniform = p;
  balanced.ids = draw(p.slots, p.num_tokens, p.top_k, 0, 1);
  uniform.ids = draw(p.slots, p.num_tokens, p.top_k, -1, 1);
  // Generations of a world come from its calls or from the plan kernel.
  MoeWorld skewed_world(p, num_devices, num_devices), skewed_kernels(p, num_devices, num_devices);
  MoeWorld balanced_world(balanced, num_devices, num_devices);
  MoeWorld balanced_kernels(balanced, num_devices, num_devices);
  MoeWorld uniform_world(uniform, num_devices, num_devices);
  check(p, skewed_world, off);
  check(p, skewed_kernels, included);
  std::vector<std::unique_ptr<Arm>> arms;
  const auto add = [&](const char* name, MoeWorld& world, const MoeRun& run) {
    arms.push_back(std::make_unique<Arm>(name, world, run));
  };
  add("off", skewed_world, off);
  add("installed", skewed_world, installed);
  add("off", skewed_world, off);
  add("included", skewed_kernels, included);
  add("balanced", balanced_world, off);
  add("balanced, on", balanced_world, installed);
  add("balanced, included", balanced_kernels, included);
  add("uniform", uniform_world, off);
  time_arms(arms);
  for (const auto& arm : arms) {
    print(bench, model.name, arm->name, arm->world.problem, num_devices, arm->timing);
  }
}

void bench_ranks() {
  for (const Model& model : kModels) {
    if (std::string(model.name).find(only_model.empty() ? "Qwen3" : only_model) ==
        std::string::npos) {
      continue;
    }
    const auto run = [&](double exponent, bool is_sorted) {
      MoeProblem p{{8, model.experts, 4}, model.top_k, model.hidden, model.intermediate, 8192};
      p.ids = draw(p.slots, p.num_tokens, p.top_k, exponent, 2, is_sorted);
      bench_arms("ranks", model, p, 1);
    };
    if (popularity.empty()) {
      for (double exponent : {0.2, 0.5, 0.8}) run(exponent, false);
      for (double exponent : {0.2, 0.5, 0.8}) run(exponent, true);
    } else {
      run(1, false);
    }
  }
}

void bench_pair() {
  if (num_gpus < 2) {
    std::printf("{\"skipped\": \"pair\", \"why\": \"needs two GPUs\"}\n");
    return;
  }
  const Model model = kModels[0];
  for (double exponent : {0.0, 0.8}) {
    MoeProblem p{{2, 96, 3}, model.top_k, model.hidden, model.intermediate, 8192};
    p.ids = draw(p.slots, p.num_tokens, p.top_k, exponent, 3);
    bench_arms("pair", model, p, 2);
  }
}

// The two products of every expert's rows by cuBLAS, on weights and rows of its own.
class VendorProducts {
 public:
  VendorProducts(const MoeProblem& p, bench::Cublas& cublas)
      : cublas_(cublas),
        hidden_(p.hidden),
        inner_(p.intermediate),
        rows_(count_ids(p.config(false), p.ids)),
        num_rows_(std::accumulate(rows_.begin(), rows_.end(), 0)),
        x_(size_t(num_rows_) * hidden_),
        h_(size_t(num_rows_) * inner_),
        gate_up_(rows_.size() * 2 * p.plane()),
        down_(rows_.size() * p.plane()),
        gate_up_out_(2 * h_.count),
        out_(x_.count) {
    fill(x_, 5, 1.0f);
    fill(h_, 6, 1.0f);
    fill(gate_up_, 1, p.plane_scale(0));
    fill(down_, 3, p.plane_scale(2));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  bool each_expert() {
    bool ok = true;
    for (const bool is_down : {false, true}) {
      for (size_t e = 0, first = 0; e < rows_.size(); first += rows_[e++]) {
        if (rows_[e] > 0) ok &= is_down ? down(e, first, rows_[e]) : gate_up(e, first, rows_[e]);
      }
    }
    return ok;
  }
  bool one_expert() { return gate_up(0, 0, num_rows_) && down(0, 0, num_rows_); }

 private:
  static void fill(DeviceArray<uint16_t>& to, uint64_t seed, float scale) {
    fill_random(DType::kBF16, to.data, to.count, seed, 0, scale);
  }
  bool gate_up(size_t expert, size_t first, int32_t rows) {
    const size_t weights = 2 * expert * hidden_ * inner_;
    return cublas_.gemm(x_.data + first * hidden_, gate_up_.data + weights,
                        gate_up_out_.data + 2 * first * inner_, rows, 2 * inner_, hidden_);
  }
  bool down(size_t expert, size_t first, int32_t rows) {
    return cublas_.gemm(h_.data + first * inner_, down_.data + expert * hidden_ * inner_,
                        out_.data + first * hidden_, rows, hidden_, inner_);
  }

  bench::Cublas& cublas_;
  const int32_t hidden_, inner_;
  const std::vector<int32_t> rows_;
  const int32_t num_rows_;
  DeviceArray<uint16_t> x_, h_, gate_up_, down_, gate_up_out_, out_;
};

// ms of what `launch` puts into the stream, which waits until the host is through.
template <typename Launch>
double time_launch(cudaStream_t stream, const cudaEvent_t (&events)[2], const Launch& launch) {
  spin_kernel<<<1, 1, 0, stream>>>(5 * kLaunchNs);
  CHECK_CUDA(cudaEventRecord(events[0], stream));
  if (!launch()) {
    std::fprintf(stderr, "cuBLAS refused a product\n");
    std::exit(3);
  }
  CHECK_CUDA(cudaEventRecord(events[1], stream));
  CHECK_CUDA(cudaStreamSynchronize(stream));
  float ms = 0;
  CHECK_CUDA(cudaEventElapsedTime(&ms, events[0], events[1]));
  return ms;
}

struct Interval {
  double low, middle, high;
};

// The median, and the order statistics between which the true one lies in 95 % of all samples,
// whatever their distribution.
Interval median_interval(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  double term = std::pow(0.5, n), below = 0;  // P(exactly k of n fall below the median), k from 0
  size_t k = 0;
  while (k < n / 2 && below + term <= 0.025) {
    below += term;
    term *= static_cast<double>(n - k) / (k + 1);
    ++k;
  }
  const size_t low = k > 0 ? k - 1 : 0;
  return {values[low], 0.5 * (values[(n - 1) / 2] + values[n / 2]), values[n - 1 - low]};
}

using Pair = std::array<double, 3>;  // ms of cuBLAS's products, the layer's tiles, the layer

void print_products(const Model& model, const char* routing, const MoeProblem& p,
                    const char* against, int version, const std::vector<Pair>& rounds) {
  std::vector<double> column[3], tiles, layer;
  for (const Pair& round : rounds) {
    for (int i = 0; i < 3; ++i) column[i].push_back(round[i]);
    tiles.push_back(round[0] / round[1]);
    layer.push_back(round[0] / round[2]);
  }
  const Interval of_tiles = median_interval(tiles), of_layer = median_interval(layer);
  std::printf(
      "{\"bench\": \"products\", \"model\": \"%s\", \"routing\": \"%s\", \"tokens\": %d, "
      "\"rows\": %zu, \"against\": \"%s\", \"cublas\": %d, \"rounds\": %zu, "
      "\"cublas_ms\": %.4f, \"tiles_ms\": %.4f, \"layer_ms\": %.4f, "
      "\"tiles_of_cublas\": %.4f, \"tiles_of_cublas_interval\": [%.4f, %.4f], "
      "\"layer_of_cublas\": %.4f, \"layer_of_cublas_interval\": [%.4f, %.4f], "
      "\"rounds_ms\": [",
      model.name, routing, p.num_tokens, p.ids[0].size(), against, version, rounds.size(),
      median(column[0]), median(column[1]), median(column[2]), of_tiles.middle, of_tiles.low,
      of_tiles.high, of_layer.middle, of_layer.low, of_layer.high);
  for (size_t i = 0; i < rounds.size(); ++i) {
    std::printf("%s[%.4f, %.4f, %.4f]", i ? ", " : "", rounds[i][0], rounds[i][1], rounds[i][2]);
  }
  std::printf("]}\n");
  std::fflush(stdout);
}

void compare_products(const Model& model, const char* routing, const MoeProblem& p,
                      bench::Cublas& cublas, cudaStream_t stream) {
  MoeWorld world(p, 1, 1);
  MoeRun run;
  run.is_balanced = false;
  check(p, world, run);
  Arm layer("layer", world, run);
  VendorProducts vendor(p, cublas);
  cudaEvent_t events[2];
  for (cudaEvent_t& event : events) CHECK_CUDA(cudaEventCreate(&event));
  double tiles_ms = 0, layer_ms = 0, each_ms = 0, one_ms = 0;
  std::vector<std::function<void()>> arms = {
      [&] {
        layer_ms = layer.call();
        const std::vector<uint64_t> stamps = world.devices[0]->stamps.get();
        tiles_ms = (stamps[static_cast<int>(MoeStamp::kTilesEndNs)] -
                    stamps[static_cast<int>(MoeStamp::kExpertsNs)]) /
                   1e6;
      },
      [&] { each_ms = time_launch(stream, events, [&] { return vendor.each_expert(); }); },
      [&] { one_ms = time_launch(stream, events, [&] { return vendor.one_expert(); }); }};
  std::vector<Pair> each, one;
  for (int round = -1; round < kPairedRounds; ++round) {  // the first one warms up
    for (const auto& arm : arms) {
      arm();  // clocks follow the power of the last call: it is of the arm's own
      arm();
    }
    std::reverse(arms.begin(), arms.end());
    if (round < 0) continue;
    each.push_back({each_ms, tiles_ms, layer_ms});
    one.push_back({one_ms, tiles_ms, layer_ms});
  }
  layer.times = {layer_ms};
  layer.finish();
  print_products(model, routing, p, "each expert's", cublas.version(), each);
  print_products(model, routing, p, "one expert's", cublas.version(), one);
  for (cudaEvent_t event : events) CHECK_CUDA(cudaEventDestroy(event));
}

void bench_products() {
  cudaStream_t stream;
  CHECK_CUDA(cudaSetDevice(0));
  CHECK_CUDA(cudaStreamCreate(&stream));
  bench::Cublas cublas;
  if (!cublas.init(stream)) {
    std::printf(
        "{\"skipped\": \"products\", \"why\": \"no libcublas; set ISER_CUBLAS_LIBRARY\"}\n");
    return;
  }
  for (const Model& model : kModels) {
    if (std::string(model.name).find(only_model) == std::string::npos) continue;
    for (double exponent : {0.0, 0.4}) {
      for (int32_t tokens : {2048, 8192}) {
        const int32_t experts = model.experts / 8;
        MoeProblem p{{1, experts, 0},
                     std::min(model.top_k, experts),
                     model.hidden,
                     model.intermediate,
                     tokens};
        p.ids = draw(p.slots, tokens, p.top_k, exponent, 1);
        compare_products(model, exponent == 0 ? "even" : "skewed", p, cublas, stream);
      }
    }
  }
}

// A layer of all of a model's experts on one GPU, routed evenly.
MoeProblem whole_layer(const Model& model, int32_t tokens) {
  MoeProblem p{{1, model.experts, 0}, model.top_k, model.hidden, model.intermediate, tokens};
  p.ids = draw(p.slots, tokens, p.top_k, 0, 1);
  return p;
}

struct Variant {
  const char* name;
  MoeProblem problem;
};

void print_variant(const char* bench, const Model& model, const Variant& base, const Variant& arm,
                   const std::vector<double>& base_ms, const std::vector<double>& arm_ms) {
  const auto flops = [](const MoeProblem& p) {
    return 6.0 * p.ids[0].size() * p.hidden * p.intermediate;
  };
  const double work = flops(arm.problem) / flops(base.problem);
  std::vector<double> times, rates;
  for (size_t i = 0; i < arm_ms.size(); ++i) {
    times.push_back(arm_ms[i] / base_ms[i]);
    rates.push_back(work * base_ms[i] / arm_ms[i]);
  }
  const Interval time = median_interval(times), rate = median_interval(rates);
  std::printf(
      "{\"bench\": \"%s\", \"model\": \"%s\", \"experts\": %d, \"tokens\": %d, \"rows\": %zu, "
      "\"base\": \"%s\", \"arm\": \"%s\", \"rounds\": %zu, \"base_ms\": %.4f, \"ms\": %.4f, "
      "\"base_tflops\": %.1f, \"tflops\": %.1f, "
      "\"time_ratio\": %.4f, \"time_ratio_interval\": [%.4f, %.4f], "
      "\"rate_ratio\": %.4f, \"rate_ratio_interval\": [%.4f, %.4f], \"rounds_ms\": [",
      bench, model.name, model.experts, arm.problem.num_tokens, arm.problem.ids[0].size(),
      base.name, arm.name, times.size(), median(base_ms), median(arm_ms),
      flops(base.problem) / median(base_ms) / 1e9, flops(arm.problem) / median(arm_ms) / 1e9,
      time.middle, time.low, time.high, rate.middle, rate.low, rate.high);
  for (size_t i = 0; i < times.size(); ++i) {
    std::printf("%s[%.4f, %.4f]", i ? ", " : "", base_ms[i], arm_ms[i]);
  }
  std::printf("]}\n");
  std::fflush(stdout);
}

// Every variant against the first and, in its world, the first again: a call each per round, there
// and back.
void compare_variants(const char* bench, const Model& model, std::vector<Variant> variants) {
  MoeRun run;
  run.is_balanced = false;
  std::vector<std::unique_ptr<MoeWorld>> worlds;
  std::vector<std::unique_ptr<Arm>> arms;
  for (const Variant& variant : variants) {
    worlds.push_back(std::make_unique<MoeWorld>(variant.problem, 1, 1));
    check(variant.problem, *worlds.back(), run);
    arms.push_back(std::make_unique<Arm>(variant.name, *worlds.back(), run));
  }
  variants.push_back({"again", variants[0].problem});
  arms.push_back(std::make_unique<Arm>("again", *worlds[0], run));
  const int count = static_cast<int>(arms.size());
  for (int round = -1; round < kPairedRounds; ++round) {  // the first one warms up
    for (int i = 0; i < count; ++i) {
      Arm& arm = *arms[round % 2 == 0 ? i : count - 1 - i];
      arm.call();  // clocks follow the power of the last call: it is of the arm's own
      const double ms = arm.call();
      if (round >= 0) arm.times.push_back(ms);
    }
  }
  for (auto& arm : arms) arm->finish();
  for (int i = 1; i < count; ++i) {
    print_variant(bench, model, variants[0], variants[i], arms[0]->times, arms[i]->times);
  }
}

constexpr Model kGptOssModels[] = {{"gpt-oss-20b", 2880, 2880, 32, 4},
                                   {"gpt-oss-120b", 2880, 2880, 128, 4}};

MoeProblem with_gpt_oss_epilogue(MoeProblem p) {
  p.has_biases = true;
  p.activation = {ActivationKind::kClampedSwiglu, 7.0f, 1.702f, 1.0f};
  return p;
}

void bench_epilogues() {
  for (const Model& model : kGptOssModels) {
    if (std::string(model.name).find(only_model) == std::string::npos) continue;
    for (int32_t tokens : {1024, 8192}) {
      const MoeProblem silu = whole_layer(model, tokens);
      MoeProblem biased = silu;
      biased.has_biases = true;
      compare_variants("epilogues", model,
                       {{"silu", silu},
                        {"silu, biases", biased},
                        {"clamped, biases", with_gpt_oss_epilogue(silu)}});
    }
  }
}

void bench_tails() {
  for (const Model& model : kGptOssModels) {
    if (std::string(model.name).find(only_model) == std::string::npos) continue;
    Model rounded = model;
    rounded.hidden = rounded.intermediate = 3072;
    MoeProblem whole = whole_layer(rounded, 8192), tails = whole_layer(model, 8192);
    whole.has_fp8_weights = tails.has_fp8_weights = true;
    compare_variants("tails", model,
                     {{"3072", whole},
                      {"2880", tails},
                      {"2880, clamped, biases", with_gpt_oss_epilogue(tails)}});
  }
}

}  // namespace

int main(int argc, char** argv) {
  std::string words;
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--gpus" && i + 1 < argc) {
      num_gpus = std::atoi(argv[++i]);
    } else if (arg == "--model" && i + 1 < argc) {
      only_model = argv[++i];
    } else if (arg == "--popularity" && i + 1 < argc) {
      std::ifstream file(argv[++i]);
      for (double value; file >> value;) popularity.push_back(value);
      if (popularity.empty()) {
        std::fprintf(stderr, "%s holds no numbers\n", argv[i]);
        return 2;
      }
    } else {
      words += " " + arg;
    }
  }
  prepare_gpus(&num_gpus);
  const auto has = [&](const char* word) {
    return words.empty() || words.find(word) != std::string::npos;
  };
  if (has("dense")) bench_dense();
  if (has("share")) bench_share(false);
  if (has("fp8")) bench_share(true);
  if (has("ranks")) bench_ranks();
  if (has("pair")) bench_pair();
  if (has("products")) bench_products();
  if (has("epilogues")) bench_epilogues();
  if (has("tails")) bench_tails();
  return 0;
}
