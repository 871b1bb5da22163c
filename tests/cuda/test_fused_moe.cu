// fused_moe on GPUs: against an oracle, and to the bit whatever replicas, ranks a device, tile
// shapes, waves and delays; faults. Prints a line a case.
//
//   test_fused_moe [--small] [--gpus N] [--only WORD] [--plant memcheck|racecheck]
//
// --only runs the cases whose name has the word in it. docs/fused_moe.md says in which order to
// look for a fault.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "tests/cuda/moe_world.cuh"
#include "tests/cuda/plant.cuh"

using namespace iser;
using namespace iser::cuda;

namespace {

int num_passed = 0, num_failed = 0, num_gpus = 1;
bool is_small = false;
std::string only;

// READY comes too late for the first tiles; tools and simulators slow small runs down.
uint64_t late_ns() { return is_small ? 3'000'000'000 : 3'000'000; }

bool is_wanted(const std::string& name) {
  return only.empty() || name.find(only) != std::string::npos;
}

void report(const std::string& name, const std::string& why) {
  (why.empty() ? num_passed : num_failed)++;
  std::printf("%s %s%s%s\n", why.empty() ? "ok  " : "FAIL", name.c_str(), why.empty() ? "" : ": ",
              why.c_str());
  std::fflush(stdout);
}

std::string same_bits(const MoeProblem& p, const std::vector<uint8_t>& got,
                      const std::vector<uint8_t>& want) {
  if (got == want) return "";
  if (got.size() != want.size()) return "sizes differ";
  const size_t at = std::mismatch(got.begin(), got.end(), want.begin()).first - got.begin();
  const size_t element = at / p.element_bytes();
  size_t different = 0;
  for (size_t i = 0; i < got.size(); ++i) different += got[i] != want[i];
  return "y[" + std::to_string(element / p.hidden) + ", " + std::to_string(element % p.hidden) +
         "] is " + std::to_string(element_of(p.dtype, got.data(), element)) + ", was " +
         std::to_string(element_of(p.dtype, want.data(), element)) + "; " +
         std::to_string(different) + " bytes differ";
}

std::string checked_call(MoeWorld& world, const MoeRun& run, std::vector<uint8_t>* y) {
  *y = world.call(run);
  std::string why = world.check_state();
  if (why.empty()) why = world.check_plan_outputs();
  return why;
}

// Few CTAs do in small runs, which tools and simulators slow down.
MoeRun sized(MoeRun run, const MoeProblem& p) {
  if (is_small && run.options.num_sms == 0) {
    run.options.num_sms = 2 * p.slots.num_ranks;
    run.options.copy_sms = 0;
  }
  return run;
}

// OFF against the oracle, then ON and everything else against OFF.
void test_case(const std::string& name, const MoeProblem& p, const std::vector<MoeRun>& runs,
               int32_t num_devices = 1, int gpus = 1) {
  if (!is_wanted(name)) return;
  MoeWorld world(p, num_devices, gpus);
  MoeRun first = runs.empty() ? MoeRun{} : runs.front();
  first.is_balanced = false;
  first.late_ready_ns = 0;
  std::vector<uint8_t> off, y;
  std::string why = checked_call(world, sized(first, p), &off);
  if (why.empty()) why = Expected(p).compare(p, off);
  if (!why.empty()) why = "OFF: " + why;
  int32_t broadcasts = 0;
  for (size_t i = 0; i < runs.size() && why.empty(); ++i) {
    why = checked_call(world, sized(runs[i], p), &y);
    broadcasts += world.num_broadcasts;
    if (why.empty()) why = same_bits(p, y, off);
    if (!why.empty()) why = "run " + std::to_string(i) + ": " + why;
  }
  report(name + ", " + std::to_string(runs.size()) + " runs, " + std::to_string(broadcasts) +
             " broadcasts",
         why);
}

MoeRun on() { return {}; }

MoeRun with_engine(MoeEngine engine) {
  MoeRun run;
  run.options.engine = engine;
  return run;
}

MoeRun with_cluster(int32_t size) {
  MoeRun run;
  run.options.cluster_size = size;
  return run;
}

std::string text(const char* format, int a, int b, int c = 0, int d = 0) {
  char line[120];
  std::snprintf(line, sizeof line, format, a, b, c, d);
  return line;
}

// The smallest thing that can work, for bringing the engine up: one rank, one expert, one tile.
void test_first() {
  for (int rows : {1, 64, 200}) {
    MoeProblem p = make_problem({1, 1, 0}, 1, 64, 64, rows, 0, 1);
    for (int32_t& id : p.ids[0]) id = 0;
    test_case(text("first: plain, %d rows, D=I=%d", rows, 64), p, {with_engine(MoeEngine::kPlain)});
    test_case(text("first: tensor, %d rows, D=I=%d", rows, 64), p, {with_cluster(1)});
    test_case(text("first: tensor in pairs, %d rows, D=I=%d", rows, 64), p, {with_cluster(2)});
  }
  const int hidden = is_small ? 320 : 1024, inner = is_small ? 256 : 448;
  MoeProblem deep = make_problem({1, 1, 0}, 1, hidden, inner, 256, 0, 1);
  for (int32_t& id : deep.ids[0]) id = 0;
  test_case(text("first: tensor, 256 rows, D=%d I=%d", hidden, inner), deep, {with_cluster(1)});
  test_case(text("first: tensor in pairs, 256 rows, D=%d I=%d", hidden, inner), deep,
            {with_cluster(1), with_cluster(2)});
}

void test_sizes() {
  for (int hidden : {64, 192, 448, 640}) {
    for (int inner : {64, 96 * 2, 320}) {
      if (is_small && hidden * inner > 64 * 64) continue;
      test_case(text("sizes: D=%d I=%d", hidden, inner),
                make_problem({2, 8, 2}, 2, hidden, inner, is_small ? 40 : 150, 1, hidden + inner),
                {with_cluster(1), with_cluster(2)});
    }
  }
}

// Sizes whose last step of K and last columns are partly there; replicas, waves and short tiles
// too.
std::vector<MoeRun> runs_of_tails() {
  std::vector<MoeRun> runs(4);
  runs[0].options.cluster_size = 1;
  runs[1].options.cluster_size = 2;
  runs[1].late_ready_ns = late_ns();
  runs[2].options.tile_rows = 64;
  runs[3].max_routes_per_rank = is_small ? 37 : 97;
  return runs;
}

void test_tails() {
  const int sizes[][2] = {{72, 136}, {8, 8}, {200, 104}, {136, 72}, {328, 456}, {1096, 200}};
  for (const auto& [hidden, inner] : sizes) {
    if (is_small && hidden > 72) continue;
    test_case(text("tails: D=%d I=%d", hidden, inner),
              make_problem({2, 8, 2}, 2, hidden, inner, is_small ? 40 : 150, 2, hidden + inner),
              runs_of_tails());
  }
}

constexpr Activation kGptOss{ActivationKind::kClampedSwiglu, 7.0f, 1.702f, 1.0f};
// The same with a limit that half of the sums exceed.
constexpr Activation kClamping{ActivationKind::kClampedSwiglu, 0.5f, 1.702f, 1.0f};
constexpr Activation kGelu{ActivationKind::kGeluTanh, 0.0f, 1.0f, 0.0f};

MoeProblem with_epilogue(MoeProblem problem, const Activation& activation, bool has_biases) {
  problem.activation = activation;
  problem.has_biases = has_biases;
  return problem;
}

// Every activation, with biases and without, by every engine.
void test_activations() {
  const struct {
    const char* name;
    DType dtype;
    bool is_fp8;
    MoeEngine engine;
    int32_t hidden, inner;
  } engines[] = {
      {"bf16", DType::kBF16, false, MoeEngine::kAuto, is_small ? 72 : 136, is_small ? 104 : 200},
      {"fp8", DType::kBF16, true, MoeEngine::kAuto, 192, is_small ? 192 : 320},
      {"plain f32", DType::kF32, false, MoeEngine::kPlain, 20, 72},
      {"plain bf16", DType::kBF16, false, MoeEngine::kPlain, 24, 71}};
  const struct {
    const char* name;
    Activation activation;
  } activations[] = {{"silu", {}}, {"gelu", kGelu}, {"clamped", kClamping}};
  for (const auto& engine : engines) {
    for (const auto& [name, activation] : activations) {
      for (bool has_biases : {false, true}) {
        if (activation.kind == ActivationKind::kSilu && !has_biases) continue;
        MoeProblem p = with_epilogue(make_problem({2, 8, 2}, 2, engine.hidden, engine.inner,
                                                  is_small ? 16 : 150, 2, 21, engine.dtype),
                                     activation, has_biases);
        p.has_fp8_weights = engine.is_fp8;
        std::vector<MoeRun> runs = runs_of_tails();
        if (is_small) runs.resize(2);
        if (is_small) runs[1].late_ready_ns = 0;
        for (MoeRun& run : runs) run.options.engine = engine.engine;
        test_case(std::string("activations: ") + engine.name + ", " + name +
                      (has_biases ? ", biases" : ""),
                  p, runs);
      }
    }
  }
}

// gpt-oss's experts at their sizes.
void test_gpt_oss() {
  if (is_small) return;
  std::vector<MoeRun> runs = runs_of_tails();
  for (bool is_fp8 : {false, true}) {
    MoeProblem p = with_epilogue(make_problem({2, 8, 2}, 4, 2880, 2880, 96, 2, 22), kGptOss, true);
    p.has_fp8_weights = is_fp8;
    test_case(is_fp8 ? "gpt-oss: fp8, D=I=2880" : "gpt-oss: bf16, D=I=2880", p, runs);
  }
}

// Experts with these many rows, on one rank, in any order.
MoeProblem with_rows(const std::vector<int32_t>& rows, int32_t hidden, int32_t inner) {
  MoeProblem p = make_problem({1, static_cast<int32_t>(rows.size()), 0}, 1, hidden, inner, 1, 0, 3);
  std::vector<int32_t> ids;
  for (size_t e = 0; e < rows.size(); ++e) ids.insert(ids.end(), rows[e], static_cast<int>(e));
  std::mt19937 rng(4);
  std::shuffle(ids.begin(), ids.end(), rng);
  p.num_tokens = ids.size();
  p.ids = {ids};
  return p;
}

// Tiles in which every warpgroup has two blocks of rows. In the last run one CTA comes back to
// places of biases that another product has used, of which I of 64 fills half in FP8.
void test_full_tiles() {
  for (bool is_fp8 : {false, true}) {
    MoeProblem p = with_epilogue(with_rows({200}, 192, 64), {}, true);
    p.has_fp8_weights = is_fp8;
    std::vector<MoeRun> runs{with_cluster(1), with_cluster(2), with_cluster(1)};
    runs[2].options.num_sms = 1;
    runs[2].options.copy_sms = 0;
    runs[2].options.tile_rows = 64;
    runs[2].max_routes_per_rank = 130;
    test_case(is_fp8 ? "activations: fp8, full tiles" : "activations: bf16, full tiles", p, runs);
  }
}

const std::vector<int32_t> kRows{0, 1, 63, 64, 65, 127, 128, 129, 257, 10'000, 0};

void test_rows() {
  const MoeProblem p = is_small ? with_rows({0, 1, 65}, 64, 64) : with_rows(kRows, 256, 192);
  std::vector<MoeRun> runs(6);
  runs[1].options.tile_rows = 64;
  runs[2].options.tile_rows = 128;
  runs[3].options.num_sms = 3;
  runs[4].options.cluster_size = 2;
  runs[5].options.cluster_size = 2;
  runs[5].options.tile_rows = 64;
  test_case("rows: 0, 1, 63 to 10,000 an expert; tiles of 256, 64, 128 rows; 3 SMs; pairs", p,
            runs);
}

void test_ranks() {
  for (int ranks : {1, 2, 4, 8}) {
    for (int kind : {0, 2, 3, 5}) {
      if (is_small && (kind != 2 || ranks > 2)) continue;
      std::vector<MoeRun> runs(is_small ? 2 : 6);
      runs[1].late_ready_ns = late_ns();
      runs[1].options.cluster_size = 2;
      if (!is_small) {
        runs[2].options.tile_rows = 128;
        runs[3].options.num_sms = 2 * ranks;
        runs[4].options.num_sms = 120;
        runs[4].options.copy_sms = 0;
        runs[5].options.cluster_size = 2;
      }
      test_case(text("ranks: V=%d, W%d", ranks, kind),
                make_problem({ranks, ranks * 6, 2}, 4, is_small ? 64 : 384, is_small ? 64 : 256,
                             is_small ? 24 : 300, kind, 10 * ranks + kind),
                runs);
    }
  }
}

// All SMs have CTAs of experts when the copy comes, and the rank that waits for it has half of
// them. It gets one more than half: extra CTAs go where only tiles are left that wait for READY.
// Before, they compute tiles, but where the budget is the caller's.
void test_extra_ctas() {
  const std::string name = "extra CTAs: the copy finds an SM";
  if (!is_wanted(name) || (is_small && only.empty())) return;
  const MoeProblem p =
      make_problem({2, 12, 2}, 4, is_small ? 256 : 2048, 64, is_small ? 40 : 600, 2, 16);
  int sms = 0;
  CHECK_CUDA(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  std::string why = sms % 4 == 0 ? "" : "SMs that are not four times some stay free";
  MoeWorld world(p, 1, 1);
  std::vector<uint8_t> off, y;
  MoeRun run;
  run.options.copy_sms = 2;
  run.options.tile_rows = 64;
  run.is_balanced = false;
  if (why.empty()) why = checked_call(world, run, &off);
  if (why.empty()) why = Expected(p).compare(p, off);
  run.is_balanced = true;
  run.late_ready_ns = late_ns();
  run.whole_sms = sms / 2 + 1;
  std::vector<MoeRun> runs(5, run);
  runs[0].options.cluster_size = runs[2].options.cluster_size = runs[3].options.cluster_size = 1;
  runs[1].options.cluster_size = 2;
  runs[2].max_routes_per_rank = is_small ? 60 : 500;
  runs[3].options.num_sms = sms - 2;
  runs[4].options.num_sms = sms;  // too many
  runs[4].options.copy_sms = 0;
  for (size_t i = 0; i < runs.size() && why.empty(); ++i) {
    why = checked_call(world, runs[i], &y);
    if (why.empty() && world.num_broadcasts == 0) why = "no tile waits for READY";
    if (why.empty()) why = same_bits(p, y, off);
    const bool is_free = runs[i].options.num_sms == 0;
    const auto tiles = world.devices[0]->stamps.get()[static_cast<int>(MoeStamp::kExtraTiles)];
    if (why.empty() && (tiles > 0) != is_free) why = std::to_string(tiles) + " extra tiles";
    if (!why.empty()) why = "run " + std::to_string(i) + ": " + why;
  }
  report(name, why);
}

void test_devices() {
  if (is_small && only.empty()) return;  // under a tool, a GPU's streams run one after the other
  for (int ranks : {2, 8}) {
    const MoeProblem p =
        make_problem({ranks, ranks * 4, 2}, 3, is_small ? 64 : 320, 128, is_small ? 24 : 200, 2, 5);
    std::vector<MoeRun> runs(2);
    for (MoeRun& run : runs) run.options.num_sms = 24;
    runs[1].late_ready_ns = late_ns();
    test_case(text("devices: P=%d as 2 devices on %d GPU", ranks, 1), p, runs, 2, 1);
    if (num_gpus >= 2) {
      runs.resize(4);
      runs[2] = runs[3] = on();
      runs[2].late_ready_ns = late_ns();
      test_case(text("devices: P=%d as 2 devices on %d GPUs", ranks, 2), p, runs, 2, 2);
    }
  }
}

void test_waves() {
  const MoeProblem p =
      make_problem({4, 16, 2}, 4, is_small ? 64 : 256, 128, is_small ? 20 : 200, 2, 6);
  std::vector<MoeRun> runs(7);
  runs[1].max_routes_per_rank = 300;
  runs[2].options.cluster_size = runs[3].options.cluster_size = 2;
  runs[2].max_routes_per_rank = 64;
  runs[3].max_routes_per_rank = 97;
  runs[3].late_ready_ns = late_ns();
  runs[4].max_routes_per_rank = is_small ? 11 : 33;
  runs[4].options.num_sms = 4;
  runs[5].max_routes_per_rank = 200;
  runs[5].options.tile_rows = 64;
  runs[6].max_routes_per_rank = 150;
  runs[6].options.cluster_size = 2;
  runs[6].options.num_sms = 8;
  test_case("waves: 1, many, odd sizes", p, runs);
  std::vector<MoeRun> plain(2, with_engine(MoeEngine::kPlain));
  plain[1].max_routes_per_rank = 75;
  test_case("waves: plain engine", p, plain);
}

void test_plain() {
  for (DType dtype : {DType::kF32, DType::kBF16}) {
    const int step = dtype == DType::kF32 ? 4 : 8;
    for (int units : {1, 3, 17}) {
      std::vector<MoeRun> runs(2, with_engine(MoeEngine::kPlain));
      runs[1].late_ready_ns = late_ns();
      test_case(text("plain: dtype %d, D=%d I=%d", static_cast<int>(dtype), units * step,
                     (units + 1) * step),
                make_problem({4, 12, 2}, 3, units * step, (units + 1) * step, is_small ? 12 : 90, 2,
                             7 + units, dtype),
                runs);
    }
  }
}

// Each layer of three in stacked weights.
void test_stacked(const char* name, MoeProblem p) {
  p.num_layers = 3;
  p.is_stacked = true;
  for (int layer = 0; layer < 3; ++layer) {
    p.layer = layer;
    test_case(text(name, layer, 3), p, {with_cluster(1), with_cluster(2)});
  }
}

void test_layers() {
  test_stacked("layers: stacked with biases, layer %d of %d",
               with_epilogue(make_problem({4, 8, 2}, 2, 72, 104, is_small ? 16 : 100, 2, 8),
                             kClamping, true));
  test_stacked("layers: stacked, layer %d of %d",
               make_problem({4, 8, 2}, 2, 128, 192, is_small ? 16 : 100, 2, 8));
}

// FP8 weights: the same things as of bf16 above.
MoeProblem in_fp8(MoeProblem problem) {
  problem.has_fp8_weights = true;
  return problem;
}

void test_fp8_sizes() {
  for (int rows : {1, 64, 100}) {
    MoeProblem p = in_fp8(make_problem({1, 1, 0}, 1, 128, 128, rows, 0, 1));
    for (int32_t& id : p.ids[0]) id = 0;
    test_case(text("fp8: first, %d rows, D=I=%d", rows, 128), p, {with_cluster(1)});
    test_case(text("fp8: first in pairs, %d rows, D=I=%d", rows, 128), p, {with_cluster(2)});
  }
  const int tails[][2] = {{192, 64}, {64, 192}, {448, 320}, {704, 576}};
  for (const auto& [hidden, inner] : tails) {
    if (is_small && hidden * inner > 192 * 64) continue;
    test_case(
        text("fp8: tails, D=%d I=%d", hidden, inner),
        in_fp8(make_problem({2, 8, 2}, 2, hidden, inner, is_small ? 24 : 150, 2, hidden + inner)),
        runs_of_tails());
  }
  for (int hidden : {256, 640, 1152}) {
    for (int inner : {128, 384}) {
      if (is_small && hidden * inner > 256 * 128) continue;
      test_case(
          text("fp8: sizes, D=%d I=%d", hidden, inner),
          in_fp8(make_problem({2, 8, 2}, 2, hidden, inner, is_small ? 40 : 150, 1, hidden + inner)),
          {with_cluster(1), with_cluster(2)});
    }
  }
}

void test_fp8_ranks() {
  for (int ranks : {1, 2, 4, 8}) {
    for (int kind = 0; kind < 8; ++kind) {
      if (is_small && (ranks != 2 || kind != 2)) continue;
      std::vector<MoeRun> runs(4);
      runs[1].late_ready_ns = late_ns();
      runs[2].options.tile_rows = 64;
      runs[3].max_routes_per_rank = is_small ? 37 : 97;
      test_case(text("fp8: ranks, V=%d, W%d", ranks, kind),
                in_fp8(make_problem({ranks, ranks * 6, 2}, 4, is_small ? 256 : 384, 256,
                                    is_small ? 16 : 200, kind, 10 * ranks + kind)),
                runs);
    }
  }
}

void test_fp8() {
  test_fp8_sizes();
  test_fp8_ranks();
  if (is_small) return;
  std::vector<MoeRun> runs(4);
  runs[1].options.tile_rows = 64;
  runs[2].options.num_sms = 3;
  runs[3].options.cluster_size = 1;
  test_case("fp8: rows, 0 to 10,000 an expert", in_fp8(with_rows(kRows, 256, 256)), runs);
  test_stacked("fp8: stacked, layer %d of %d",
               in_fp8(make_problem({4, 8, 2}, 2, 128, 256, 100, 2, 8)));
  std::vector<MoeRun> kernels(3);
  for (MoeRun& run : kernels) run.by_kernels = true;
  kernels[1].late_ready_ns = late_ns();
  const MoeProblem whole = in_fp8(make_problem({8, 32, 3}, 4, 256, 384, 300, 2, 12));
  test_case("fp8: plan and copy by their kernels, V=8", whole, kernels);
  if (num_gpus >= 2) test_case("fp8: plan and copy by their kernels, 2 GPUs", whole, kernels, 2, 2);
  test_case("fp8: model, P=8 E=64 D=2048 I=768",
            in_fp8(make_problem({8, 64, 3}, 4, 2048, 768, 128, 2, 11)), std::vector<MoeRun>(2));
}

// A larger one, near a model's sizes, with everything that may change between runs.
void test_model() {
  if (is_small) return;
  std::vector<MoeRun> runs(8);
  runs[6].options.cluster_size = 1;
  runs[7].options.cluster_size = 2;
  runs[1].options.tile_rows = 128;
  runs[2].options.num_sms = 40;
  runs[3].max_routes_per_rank = 900;
  runs[4].late_ready_ns = late_ns();
  runs[5].options.num_sms = 120;
  test_case("model: P=8 E=64 D=2048 I=768, 8 ranks a GPU",
            make_problem({8, 64, 3}, 4, 2048, 768, 128, 2, 11), runs);
}

void test_kernels() {
  std::vector<MoeRun> runs(4);
  for (MoeRun& run : runs) run.by_kernels = true;
  runs[1].late_ready_ns = late_ns();
  const MoeProblem p = make_problem({8, 32, 3}, 4, 256, 192, is_small ? 24 : 300, 2, 12);
  test_case("kernels: plan and copy by theirs, V=8", p, runs);
  if (num_gpus >= 2) test_case("kernels: plan and copy by theirs, 2 GPUs", p, runs, 2, 2);
  const MoeProblem whole = with_epilogue(
      make_problem({8, 32, 3}, 4, 136, 200, is_small ? 24 : 300, 2, 12), kClamping, true);
  test_case("kernels: plan and copy by theirs, biases", whole, runs);
}

// The same bits over many calls, with one rank late at dispatch now and then.
void test_repeats(const std::string& name, const MoeProblem& p) {
  if (!is_wanted(name) || is_small) return;
  MoeWorld world(p, 1, 1);
  std::vector<uint8_t> first, y;
  std::string why = checked_call(world, on(), &first);
  for (int i = 1; i < 100 && why.empty(); ++i) {
    if (i % 10 == 0) {
      std::vector<uint64_t> late(world.devices[0]->stalls.count, 0);
      late[i / 10 % 4 * static_cast<int>(Stage::kNumStages) + 2] = 3'000'000;
      world.devices[0]->stalls.put(late);
    }
    MoeRun run = with_cluster(i % 3);
    run.is_balanced = i % 4 != 0;
    why = checked_call(world, run, &y);
    if (why.empty()) why = same_bits(p, y, first);
    if (!why.empty()) why = "call " + std::to_string(i) + ": " + why;
  }
  report(name, why);
}

// Calls while generations wrap around, and with them the counters of arrivals.
void test_wrap() {
  const std::string name = "wrap: five calls from generation 2^32 - 2 on";
  if (!is_wanted(name)) return;
  const MoeProblem p = make_problem({4, 8, 2}, 2, 128, 128, is_small ? 16 : 64, 2, 15);
  MoeWorld world(p, 1, 1);
  world.begin_at(0u - 2);
  MoeRun run = sized(on(), p);
  run.late_ready_ns = late_ns();  // a gate that opens early lets stale replicas through
  std::vector<uint8_t> want, y;
  std::string why = checked_call(world, run, &want);
  for (int i = 0; i < 4 && why.empty(); ++i) {
    why = checked_call(world, run, &y);
    if (why.empty()) why = same_bits(p, y, want);
  }
  if (why.empty() && world.generation != 2) {
    why = "the last generation is " + std::to_string(world.generation);
  }
  report(name, why);
}

// A captured launch serves other generations.
void test_graph() {
  const std::string name = "graph: captured once, three calls";
  if (!is_wanted(name)) return;
  const MoeProblem p = make_problem({4, 8, 2}, 2, 128, 128, 64, 2, 14);
  MoeWorld world(p, 1, 1);
  std::vector<uint8_t> want, y;
  std::string why = checked_call(world, on(), &want);
  const cudaStream_t stream = world.devices[0]->main;
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  CHECK_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  world.fused(0, on());
  CHECK_CUDA(cudaStreamEndCapture(stream, &graph));
  CHECK_CUDA(cudaGraphInstantiate(&exec, graph, 0));
  for (int i = 0; i < 3 && why.empty(); ++i) {
    world.prepare(on());
    CHECK_CUDA(cudaGraphLaunch(exec, stream));
    world.sync();
    why = world.check_state();
    if (why.empty()) why = same_bits(p, world.outputs(), want);
  }
  CHECK_CUDA(cudaGraphExecDestroy(exec));
  CHECK_CUDA(cudaGraphDestroy(graph));
  report(name, why);
}

bool is_nan_filled(const MoeDevice& device) {
  const std::vector<uint8_t> y = device.y.get();
  return std::all_of(y.begin(), y.end() - kTailGuard, [](uint8_t byte) { return byte == 0xff; });
}

// y is NaN, the plan's outputs are those of a failure with this code.
std::string check_failure(const MoeWorld& world, int32_t d, ErrorCode code) {
  const MoeDevice& device = *world.devices[d];
  const std::vector<int32_t> scalars = device.out_scalars.get();
  if (scalars[1] != static_cast<int32_t>(code)) return "status is " + std::to_string(scalars[1]);
  if (scalars[0] != 0) return "num_broadcasts is " + std::to_string(scalars[0]);
  for (int32_t slot : device.out_route_slot.get()) {
    if (slot != -1) return "route_slot of a failed call is " + std::to_string(slot);
  }
  if (!is_nan_filled(device)) return "y is not NaN everywhere";
  return "";
}

void test_faults() {
  const MoeProblem p = make_problem({4, 8, 2}, 2, 128, 128, 64, 2, 15);
  constexpr uint64_t kShortNs = 200'000'000;
  const auto run_fault = [&](const std::string& name, ErrorCode code, Stage stage, int32_t devices,
                             const auto& disturb, const MoeRun& run) {
    if (!is_wanted(name)) return;
    MoeWorld world(p, devices, 1, kShortNs);
    world.prepare(run);
    disturb(world);
    world.fused(0, run);
    world.sync();
    std::string why = check_failure(world, 0, code);
    const ProcessWords words = world.words(0);
    if (why.empty() && code != ErrorCode::kBadHandle) {
      if (words.aborted != 1 || words.error.code != static_cast<int32_t>(code)) {
        why = "error word has code " + std::to_string(words.error.code);
      } else if (code == ErrorCode::kTimeout && words.error.stage != static_cast<int32_t>(stage)) {
        why = "stage is " + std::to_string(words.error.stage);
      }
    }
    if (why.empty() && code != ErrorCode::kBadHandle) why = world.check_state(true);
    report(name, why);
  };
  const auto nothing = [](MoeWorld&) {};
  MoeRun never_ready;
  never_ready.has_ready = false;
  run_fault("faults: a device that does not come", ErrorCode::kTimeout, Stage::kDispatch, 2,
            nothing, on());
  run_fault("faults: READY never comes, helper tiles", ErrorCode::kTimeout, Stage::kReady, 1,
            nothing, never_ready);
  never_ready.is_balanced = false;
  run_fault("faults: READY never comes, no helper tile", ErrorCode::kTimeout, Stage::kReady, 1,
            nothing, never_ready);
  run_fault(
      "faults: failed before", ErrorCode::kClosed, Stage::kDispatch, 1,
      [](MoeWorld& world) {
        ProcessWords words = world.words(0);
        words.error.code = static_cast<int32_t>(ErrorCode::kClosed);
        words.aborted = 1;
        MoeWorld::set(reinterpret_cast<uint8_t*>(world.head(0)),
                      reinterpret_cast<const uint8_t*>(&words), sizeof words);
      },
      on());
  run_fault(
      "faults: ranks with different plans", ErrorCode::kPlanMismatch, Stage::kReady, 1,
      [](MoeWorld& world) {
        const uint64_t hash = 1;
        MoeWorld::set(&world.block(2).words()->plan_hash, &hash, 1);
      },
      on());
  run_fault(
      "faults: other tokens than start had", ErrorCode::kBadFusedMoe, Stage::kDispatch, 1,
      [](MoeWorld& world) {
        const int32_t tokens = 63;
        MoeWorld::set(&mail_tags(world.shape, world.head(0), world.generation)[0].tag.num_tokens,
                      &tokens, 1);
      },
      on());
  run_fault(
      "faults: a handle of no Domain", ErrorCode::kBadHandle, Stage::kDispatch, 1,
      [](MoeWorld& world) { world.devices[0]->ticket.put({kDomainId + 1, 0, kProcessMark, 0}); },
      on());
  run_fault(
      "faults: a handle of another process", ErrorCode::kBadHandle, Stage::kDispatch, 1,
      [](MoeWorld& world) { world.devices[0]->ticket.put({kDomainId, 0, kProcessMark + 1, 0}); },
      on());
}

void test_refusals() {
  if (!is_wanted("refusals")) return;
  const DomainShape good = make_shape({4, 8, 1}, 2, 128, 128, 16, 2, 2);
  std::string why;
  const auto expect = [&](bool is_taken, const DomainShape& shape, DType dtype,
                          const FusedOptions& options, const char* what) {
    if ((fused_error(shape, 4, dtype, options) == nullptr) != is_taken && why.empty()) why = what;
  };
  DomainShape shape = good;
  expect(true, good, DType::kBF16, {}, "good sizes");
  expect(false, good, DType::kF32, {}, "another dtype");
  shape.hidden = 132;
  expect(false, shape, DType::kBF16, {}, "rows of 264 bytes");
  shape.hidden = 136;
  shape.intermediate = 132;
  expect(true, shape, DType::kBF16, {}, "I=132, plain");
  DomainShape in_blocks = in_fp8(good);
  expect(true, in_blocks, DType::kBF16, {}, "FP8");
  in_blocks.intermediate = 192;
  expect(true, in_blocks, DType::kBF16, {}, "FP8, I=192");
  in_blocks.intermediate = 160;
  expect(false, in_blocks, DType::kBF16, {}, "FP8, I=160");
  in_blocks.intermediate = 128;
  in_blocks.element_bytes = 4;
  expect(false, in_blocks, DType::kF32, {}, "FP8 with f32");
  FusedOptions options;
  options.engine = MoeEngine::kTensor;
  expect(false, shape, DType::kBF16, options, "I=132, tensor");
  options.engine = MoeEngine::kAuto;
  options.tile_rows = 96;
  expect(false, good, DType::kBF16, options, "tiles of 96 rows");
  options.tile_rows = 0;
  options.cluster_size = 3;
  expect(false, good, DType::kBF16, options, "clusters of 3");
  if (fused_engine(good, DType::kBF16, {}) != MoeEngine::kTensor) why = "engine of good sizes";
  if (fused_engine(shape, DType::kBF16, {}) != MoeEngine::kPlain) why = "engine of I=132";
  shape.intermediate = 136;
  if (fused_engine(shape, DType::kBF16, {}) != MoeEngine::kTensor) why = "engine of D=I=136";
  shape = good;
  shape.weight_format = WeightFormat::kFloat32;
  expect(false, shape, DType::kBF16, {}, "f32 weights with bf16");
  shape = good;
  shape.activation = {ActivationKind::kClampedSwiglu, 0.0f, 1.0f, 0.0f};
  expect(false, shape, DType::kBF16, {}, "a limit of 0");
  shape.activation = kGptOss;
  expect(true, shape, DType::kBF16, {}, "gpt-oss's activation");
  // routes_done counts up to 2^32 - 1.
  shape = good;
  shape.top_k = 32;
  shape.max_tokens = 1 << 20;
  shape.hidden = 64 * 127;
  expect(true, shape, DType::kBF16, {}, "2^25 routes by 127 units");
  shape.hidden += 8;
  expect(false, shape, DType::kBF16, {}, "2^25 routes by 128 units");
  report("refusals", why);
}

}  // namespace

int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    const bool has_value = i + 1 < argc;
    if (arg == "--small") {
      is_small = true;
    } else if (arg == "--gpus" && has_value) {
      num_gpus = std::atoi(argv[++i]);
    } else if (arg == "--only" && has_value) {
      only = argv[++i];
    } else if (arg == "--plant" && has_value) {
      return plant(argv[++i]);
    } else {
      std::fprintf(stderr, "unknown argument %s\n", argv[i]);
      return 2;
    }
  }
  prepare_gpus(&num_gpus);
  test_refusals();
  test_first();
  test_plain();
  test_sizes();
  test_tails();
  test_activations();
  test_gpt_oss();
  test_full_tiles();
  test_rows();
  test_ranks();
  test_extra_ctas();
  test_devices();
  test_waves();
  test_layers();
  test_wrap();
  test_kernels();
  test_graph();
  test_model();
  test_fp8();
  if (!is_small) test_faults();
  const MoeProblem repeated = make_problem({4, 16, 2}, 4, 512, 256, 256, 2, 13);
  test_repeats("repeats: 100 calls, late ranks", repeated);
  test_repeats("fp8: repeats, 100 calls, late ranks", in_fp8(repeated));
  std::printf("%d passed, %d failed\n", num_passed, num_failed);
  return num_failed == 0 ? 0 : 1;
}
