// expert_tile and gemm_tn: against double precision, and bit for bit over ISAs, tile heights,
// positions and threads. Every buffer is poisoned before a call and fenced by guard words; build
// with -fsanitize=address,undefined to check reads as well.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "ffi/cpu/gemm.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

using namespace iser;
using namespace iser::cpu;

namespace {

int num_failures = 0;

template <class... Args>
void fail(const char* format, Args... args) {
  if (++num_failures > 20) return;
  std::fprintf(stderr, "FAIL [%s] ", gemm_isa());
  std::fprintf(stderr, format, args...);
  std::fputc('\n', stderr);
}

constexpr uint32_t kGuard = 0xfeedc0deu;
const DType kDTypes[] = {DType::kF32, DType::kBF16};
const char* name_of(DType dtype) { return dtype == DType::kF32 ? "f32" : "bf16"; }
size_t size_of(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }

std::vector<const char*> available_isas() {
  std::vector<const char*> names;
  for (const char* name : {"portable", "neon", "avx2", "avx512"})
    if (set_gemm_isa(name)) names.push_back(name);
  return names;
}

// A heap block of exactly `bytes` (the sanitizer sees the first byte past it), filled with values
// of `dtype`.
class Values {
 public:
  Values(size_t count, DType dtype) : dtype_(dtype), bytes_(count * size_of(dtype)) {}
  Values(size_t count, DType dtype, std::mt19937& random, float scale) : Values(count, dtype) {
    std::normal_distribution<float> normal(0, scale);
    for (size_t i = 0; i < count; ++i) set(i, normal(random));
  }
  void set(size_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);  // truncation: inputs only
    std::memcpy(at(i), dtype_ == DType::kF32 ? static_cast<const void*>(&bits) : &half,
                size_of(dtype_));
  }
  double get(size_t i) const { return value_at(at(i), dtype_); }
  const char* at(size_t i) const { return bytes_.data() + i * size_of(dtype_); }
  char* at(size_t i) { return bytes_.data() + i * size_of(dtype_); }
  static double value_at(const void* p, DType dtype) {
    uint32_t bits = 0;
    std::memcpy(reinterpret_cast<char*>(&bits) + (dtype == DType::kF32 ? 0 : 2), p,
                size_of(dtype));  // little endian
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

 private:
  DType dtype_;
  std::vector<char> bytes_;
};

struct Expert {
  int hidden, intermediate;
  DType dtype;
  Values gate, up, down;
  std::vector<float> gate_bias, up_bias, down_bias;  // empty for none
  Activation activation;

  ExpertTile tile(const void* const* rows, void* const* out_rows, int num_rows) const {
    ExpertTile tile{};
    tile.rows = rows;
    tile.out_rows = out_rows;
    tile.num_rows = num_rows;
    tile.gate = gate.at(0), tile.up = up.at(0), tile.down = down.at(0);
    if (!gate_bias.empty()) {
      tile.gate_bias = gate_bias.data(), tile.up_bias = up_bias.data();
      tile.down_bias = down_bias.data();
    }
    tile.hidden = hidden;
    tile.intermediate = intermediate;
    tile.dtype = dtype;
    tile.weight_format = dtype == DType::kF32 ? WeightFormat::kFloat32 : WeightFormat::kBFloat16;
    tile.activation = activation;
    return tile;
  }
  void add_biases(std::mt19937& random) {
    std::normal_distribution<float> normal;
    for (std::vector<float>* bias : {&gate_bias, &up_bias, &down_bias}) {
      bias->resize(bias == &down_bias ? hidden : intermediate);
      for (float& value : *bias) value = normal(random);
    }
  }

  Expert(int hidden, int intermediate, DType dtype, std::mt19937& random)
      : hidden(hidden),
        intermediate(intermediate),
        dtype(dtype),
        gate(size_t(hidden) * intermediate, dtype, random, 1 / std::sqrt(float(hidden))),
        up(size_t(hidden) * intermediate, dtype, random, 1 / std::sqrt(float(hidden))),
        down(size_t(hidden) * intermediate, dtype, random, 1 / std::sqrt(float(intermediate))) {}
};

// Runs one tile with poisoned outputs and scratch; returns each row's bytes.
std::vector<std::string> run_tile(const Expert& expert, const std::vector<const void*>& rows) {
  const size_t row_bytes = expert.hidden * size_of(expert.dtype);
  std::vector<std::vector<char>> outs(rows.size(), std::vector<char>(row_bytes + 8, char(0xff)));
  std::vector<void*> out_rows;
  for (auto& out : outs) {
    std::memcpy(out.data(), &kGuard, 4);
    std::memcpy(out.data() + 4 + row_bytes, &kGuard, 4);
    out_rows.push_back(out.data() + 4);
  }
  const size_t bytes =
      expert_tile_scratch_bytes(expert.hidden, expert.intermediate, int(rows.size()), expert.dtype);
  auto* scratch = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 64 + 63) / 64 * 64));
  std::memset(scratch, 0xff, bytes);
  std::memcpy(scratch + bytes, &kGuard, 4);
  expert_tile(expert.tile(rows.data(), out_rows.data(), int(rows.size())), scratch);
  if (std::memcmp(scratch + bytes, &kGuard, 4))
    fail("scratch guard overwritten, %zu rows", rows.size());
  std::free(scratch);
  std::vector<std::string> results;
  for (auto& out : outs) {
    if (std::memcmp(out.data(), &kGuard, 4) || std::memcmp(out.data() + 4 + row_bytes, &kGuard, 4))
      fail("output guard overwritten, %zu rows", rows.size());
    results.emplace_back(out.data() + 4, row_bytes);
  }
  return results;
}

void expect_same(const std::string& got, const std::string& want, const Expert& expert,
                 const char* what, int height, int row) {
  if (got == want) return;
  const size_t size = size_of(expert.dtype);
  size_t d = 0;
  while (!std::memcmp(&got[d * size], &want[d * size], size)) ++d;
  fail("%s D=%d I=%d %s height %d row %d: first differs at d=%zu: got %.9g, expected %.9g", what,
       expert.hidden, expert.intermediate, name_of(expert.dtype), height, row, d,
       Values::value_at(&got[d * size], expert.dtype),
       Values::value_at(&want[d * size], expert.dtype));
}

// The activation in double: what is multiplied, g * sigmoid(a) and the linear part.
std::pair<double, double> activated(const Activation& activation, double g, double u) {
  switch (activation.kind) {
    case ActivationKind::kSilu:
      return {g / (1 + std::exp(-g)), u};
    case ActivationKind::kGeluTanh: {
      const double inner = std::sqrt(2 / std::acos(-1.0)) * (g + 0.044715 * g * g * g);
      return {0.5 * g * (1 + std::tanh(inner)), u};
    }
    case ActivationKind::kClampedSwiglu: {
      const double limit = activation.limit;
      const double most = std::fmin(g, limit), linear = std::fmax(-limit, std::fmin(u, limit));
      return {most / (1 + std::exp(-double(activation.alpha) * most)), linear + activation.offset};
    }
  }
  return {};
}

// Checks one row against double precision. The bound is the first-order one of a sum of n products
// in any order, n * eps * sum |a||b|, carried through the activation (slope at most 1.13; what is
// in the exponent within 4 eps, exp and division within 8) and through the roundings to dtype.
void check_row(const Expert& e, const Values& x, size_t row, const std::string& got) {
  const double eps = std::ldexp(1.0, -24),
               unit = e.dtype == DType::kF32 ? eps : std::ldexp(1.0, -8);
  std::vector<double> h(e.intermediate), h_error(e.intermediate);
  for (int i = 0; i < e.intermediate; ++i) {
    double g = 0, u = 0, g_size = 0, u_size = 0;
    for (int k = 0; k < e.hidden; ++k) {
      const double value = x.get(row * e.hidden + k), a = e.gate.get(size_t(i) * e.hidden + k),
                   b = e.up.get(size_t(i) * e.hidden + k);
      g += value * a, u += value * b, g_size += std::fabs(value * a),
          u_size += std::fabs(value * b);
    }
    if (!e.gate_bias.empty()) {
      g += e.gate_bias[i], g_size += std::fabs(e.gate_bias[i]);
      u += e.up_bias[i], u_size += std::fabs(e.up_bias[i]);
    }
    const auto [s, linear] = activated(e.activation, g, u);
    h[i] = s * linear;
    const bool is_silu = e.activation.kind == ActivationKind::kSilu;
    h_error[i] = 1.13 * (e.hidden + 1) * eps * g_size * std::fabs(linear) +
                 std::fabs(s) * (e.hidden + 1) * eps * u_size +
                 (unit + 10 * eps) * std::fabs(h[i]) +
                 (is_silu ? 0 : 4 * eps * std::fabs(g * linear));
  }
  for (int d = 0; d < e.hidden; ++d) {
    double y = 0, error = 0;
    for (int i = 0; i < e.intermediate; ++i) {
      const double w = e.down.get(size_t(d) * e.intermediate + i);
      y += w * h[i], error += std::fabs(w) * (h_error[i] + e.intermediate * eps * std::fabs(h[i]));
    }
    if (!e.down_bias.empty()) y += e.down_bias[d], error += eps * std::fabs(y);
    error = 1.05 * (error + unit * std::fabs(y)) + 1e-37;
    const double value = Values::value_at(&got[d * size_of(e.dtype)], e.dtype);
    if (!(std::fabs(value - y) <= error))
      fail("D=%d I=%d %s row %zu d=%d: got %.9g, expected %.9g within %.3g", e.hidden,
           e.intermediate, name_of(e.dtype), row, d, value, y, error);
  }
}

// Every row alone on the portable path is the reference; then all heights, rotated so that rows
// visit different positions.
void test_sizes(const std::vector<const char*>& isas, int hidden, int intermediate, DType dtype,
                const std::vector<int>& heights, const Activation& activation = {},
                bool has_biases = false) {
  std::mt19937 random(hidden * 131 + intermediate);
  const int num_rows = heights.back();
  Expert expert(hidden, intermediate, dtype, random);
  expert.activation = activation;
  if (has_biases) expert.add_biases(random);
  const Values x(size_t(num_rows) * hidden, dtype, random, 1.0f);
  std::vector<std::string> alone;
  set_gemm_isa("portable");
  for (int row = 0; row < num_rows; ++row) {
    alone.push_back(run_tile(expert, {x.at(size_t(row) * hidden)})[0]);
    if (row < 8) check_row(expert, x, row, alone[row]);
  }
  for (const char* isa : isas) {
    set_gemm_isa(isa);
    for (int height : heights) {
      const int shift = height * 5 % num_rows;
      std::vector<const void*> rows;
      for (int i = 0; i < height; ++i)
        rows.push_back(x.at(size_t((i + shift) % num_rows) * hidden));
      const auto results = run_tile(expert, rows);
      for (int i = 0; i < height; ++i)
        expect_same(results[i], alone[(i + shift) % num_rows], expert, "height", height, i);
    }
  }
}

// Biases, and every activation with parameters that show.
void test_activations(const std::vector<const char*>& isas, DType dtype) {
  const Activation activations[] = {{},
                                    {ActivationKind::kGeluTanh},
                                    {ActivationKind::kClampedSwiglu, 0.75f, 1.702f, 1.0f},
                                    {ActivationKind::kClampedSwiglu, 7.0f, -0.5f, 0.25f}};
  for (const Activation& activation : activations) {
    for (const bool has_biases : {false, true}) {
      for (const auto& [hidden, intermediate] : {std::pair{1, 1}, {17, 3}, {60, 100}, {130, 97}}) {
        test_sizes(isas, hidden, intermediate, dtype, {1, 2, 7, 16, 33, 50}, activation,
                   has_biases);
      }
    }
  }
}

// One row at each position of a tile of otherwise different rows.
void test_positions(const std::vector<const char*>& isas, DType dtype) {
  std::mt19937 random(7);
  const Expert expert(72, 40, dtype, random);
  const int height = preferred_tile_rows(72, 40, dtype) + 5;
  const Values x(size_t(height + 1) * 72, dtype, random, 1.0f);
  set_gemm_isa("portable");
  const std::string want = run_tile(expert, {x.at(0)})[0];
  for (const char* isa : isas) {
    set_gemm_isa(isa);
    for (int position = 0; position < height; ++position) {
      std::vector<const void*> rows;
      for (int i = 0; i < height; ++i) rows.push_back(x.at(size_t(i == position ? 0 : i + 1) * 72));
      expect_same(run_tile(expert, rows)[position], want, expert, "position", height, position);
    }
  }
}

// NaN, infinity, huge and denormal rows: their neighbours keep their bits, NaN stays in its row,
// and flushing modes change nothing.
void test_special_values(const std::vector<const char*>& isas, DType dtype) {
  std::mt19937 random(11);
  constexpr int kHidden = 33, kRows = 40;
  const Expert expert(kHidden, 50, dtype, random);
  Values x(size_t(kRows) * kHidden, dtype, random, 1.0f);
  x.set(3 * kHidden + 5, std::nanf(""));
  x.set(20 * kHidden, std::numeric_limits<float>::infinity());
  for (int k = 0; k < kHidden; ++k) {
    x.set(5 * kHidden + k, 1e-39f);
    x.set(6 * kHidden + k, 3e18f);
    x.set(7 * kHidden + k, 0.0f);
    x.set(8 * kHidden + k, -400.0f * (k % 2 ? 1 : -1));
  }
  set_gemm_isa("portable");
  std::vector<std::string> alone;
  std::vector<const void*> rows;
  for (int row = 0; row < kRows; ++row) {
    rows.push_back(x.at(size_t(row) * kHidden));
    alone.push_back(run_tile(expert, {rows.back()})[0]);
  }
  const uint32_t nan_bits = 0x7fc00000u;
  for (int d = 0; d < kHidden; ++d) {
    if (std::memcmp(&alone[3][d * size_of(dtype)],
                    reinterpret_cast<const char*>(&nan_bits) + 4 - size_of(dtype), size_of(dtype)))
      fail("a NaN input must give the quiet NaN at d=%d, got %g", d,
           Values::value_at(&alone[3][d * size_of(dtype)], dtype));
    if (Values::value_at(&alone[7][d * size_of(dtype)], dtype) != 0)
      fail("a zero row must give zeros at d=%d", d);
    if (std::isnan(Values::value_at(&alone[8][d * size_of(dtype)], dtype)))
      fail("large finite rows must stay numbers at d=%d", d);
  }
  for (const char* isa : isas) {
    set_gemm_isa(isa);
#if defined(__x86_64__)
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(saved | 0x8040 | 0x6000);  // flush to zero, denormals are zero, round toward zero
#endif
    const auto results = run_tile(expert, rows);
#if defined(__x86_64__)
    if (_mm_getcsr() >> 6 != (saved | 0x8040 | 0x6000) >> 6)
      fail("the caller's float mode was not restored");
    _mm_setcsr(saved);
#endif
    for (int row = 0; row < kRows; ++row)
      expect_same(results[row], alone[row], expert, "special", kRows, row);
  }
}

// silu over its whole range: x = 1 everywhere, gate holds the argument, up and down pass it on.
void test_silu(const std::vector<const char*>& isas) {
  const float step = 0.37f;
  std::vector<float> arguments;
  for (float g = -120; g < 120; g += step) arguments.push_back(g);
  for (float g : {-0.0f, 1e-40f, -88.7f, -88.8f, 88.8f, 3e38f, -3e38f}) arguments.push_back(g);
  std::mt19937 random(1);
  for (const char* isa : isas) {
    set_gemm_isa(isa);
    for (float g : arguments) {
      Expert expert(1, 1, DType::kF32, random);
      expert.gate.set(0, g), expert.up.set(0, 1), expert.down.set(0, 1);
      Values x(1, DType::kF32);
      x.set(0, 1);
      const double got = Values::value_at(run_tile(expert, {x.at(0)})[0].data(), DType::kF32);
      const double want = double(g) / (1 + std::exp(-double(g)));
      // 4 ulp; below -88 the sum 1 + exp overflows in f32 and the result is -0 instead of some
      // -1e-37.
      if (!(std::fabs(got - want) <= std::ldexp(std::fabs(want), -22) + 1e-36))
        fail("silu(%.9g) = %.9g, expected %.9g", double(g), got, want);
    }
  }
}

// gemm_tn has one exact answer: the scalar chain of fused multiply-adds.
void test_gemm_tn(const std::vector<const char*>& isas) {
  std::mt19937 random(3);
  const int sizes[][3] = {{1, 1, 1},     {5, 3, 2},     {33, 100, 129},
                          {97, 13, 300}, {400, 20, 31}, {0, 4, 4}};
  for (const auto& [m, n, k] : sizes) {
    const Values x(size_t(m) * k, DType::kF32, random, 1.0f),
        w(size_t(n) * k, DType::kF32, random, 1.0f);
    std::vector<float> want(size_t(m) * n, 0.0f);
    for (int i = 0; i < m; ++i)
      for (int j = 0; j < n; ++j)
        for (int l = 0; l < k; ++l)
          want[size_t(i) * n + j] =
              std::fma(float(w.get(size_t(j) * k + l)), float(x.get(size_t(i) * k + l)),
                       want[size_t(i) * n + j]);
    for (const char* isa : isas) {
      set_gemm_isa(isa);
      std::vector<float> got(size_t(m) * n, std::nanf(""));
      const size_t bytes = gemm_tn_scratch_bytes(m, k);
      auto* scratch = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
      std::memset(scratch, 0xff, bytes);
      gemm_tn(m, n, k, reinterpret_cast<const float*>(x.at(0)),
              reinterpret_cast<const float*>(w.at(0)), got.data(), scratch);
      std::free(scratch);
      for (size_t i = 0; i < got.size(); ++i)
        if (std::memcmp(&got[i], &want[i], 4)) {
          fail("gemm_tn %dx%dx%d differs at (%zu, %zu): got %.9g, expected %.9g", m, n, k, i / n,
               i % n, double(got[i]), double(want[i]));
          break;
        }
    }
  }
}

void test_threads(const std::vector<const char*>& isas) {
  std::mt19937 random(5);
  const Expert expert(128, 96, DType::kF32, random);
  const Values x(64 * 128, DType::kF32, random, 1.0f);
  std::vector<const void*> rows;
  for (int i = 0; i < 64; ++i) rows.push_back(x.at(size_t(i) * 128));
  for (const char* isa : isas) {
    set_gemm_isa(isa);
    const auto want = run_tile(expert, rows);
    std::vector<std::vector<std::string>> got(4);
    std::vector<std::thread> threads;
    for (auto& result : got) threads.emplace_back([&] { result = run_tile(expert, rows); });
    for (auto& thread : threads) thread.join();
    for (auto& result : got)
      for (int i = 0; i < 64; ++i) expect_same(result[i], want[i], expert, "thread", 64, i);
  }
}

// A child process each, because the variable is read once.
void test_environment() {
  const auto isa_with = [](const char* value) {
    const pid_t child = fork();
    if (child == 0) {
      setenv("ISER_CPU_ISA", value, 1);
      try {
        _exit(std::strcmp(gemm_isa(), value) ? 1 : 0);
      } catch (const std::invalid_argument& error) {
        _exit(std::strstr(error.what(), value) && std::strstr(error.what(), "ISER_CPU_ISA") ? 2
                                                                                            : 3);
      }
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  };
  const int portable = isa_with("portable"), unknown = isa_with("sse9");
  if (portable != 0) fail("ISER_CPU_ISA=portable: child ended with %d, expected 0", portable);
  if (unknown != 2)
    fail("ISER_CPU_ISA=sse9: child ended with %d, expected 2 (an error naming it)", unknown);
}

}  // namespace

int main() {
  test_environment();
  const std::vector<const char*> isas = available_isas();
  const std::string best = (set_gemm_isa(nullptr), gemm_isa());
  if (set_gemm_isa("sse9") || gemm_isa() != best) fail("set_gemm_isa accepted an unknown name");
  for (DType dtype : kDTypes) {
    const std::vector<int> heights = {0,  1,  2,  3,  7,  8,  9,  15, 16, 17, 31,
                                      32, 33, 47, 48, 49, 64, 95, 96, 97, 130};
    for (const auto& [hidden, intermediate] :
         {std::pair{1, 1}, {3, 17}, {17, 3}, {100, 100}, {64, 96}, {129, 257}, {260, 50}})
      test_sizes(isas, hidden, intermediate, dtype, heights);
    test_sizes(isas, 512, 1024, dtype, {1, 5, 33});
    test_activations(isas, dtype);
    test_positions(isas, dtype);
    test_special_values(isas, dtype);
  }
  test_silu(isas);
  test_gemm_tn(isas);
  test_threads(isas);
  std::string names;
  for (const char* isa : isas) names += std::string(names.empty() ? "" : ", ") + isa;
  if (num_failures)
    return std::fprintf(stderr, "%d failures (%s)\n", num_failures, names.c_str()), 1;
  std::printf("gemm: all equal on %s\n", names.c_str());
  return 0;
}
