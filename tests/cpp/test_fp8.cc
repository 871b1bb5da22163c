// Links: ffi/cpu/gemm*.cc
// e4m3 by hand against a search of the nearest, rows through their records, and expert_tile with
// FP8 planes: against double precision, and bit for bit over ISAs, tile heights and positions.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "ffi/cpu/fp8_rows.h"
#include "ffi/cpu/gemm.h"

namespace iser::cpu {
namespace {

int num_failed = 0;

void expect(bool holds, const char* what, double a = 0, double b = 0) {
  if (holds) return;
  if (++num_failed <= 20) std::printf("FAIL [%s] %s: %.9g, %.9g\n", gemm_isa(), what, a, b);
}

uint8_t nearest_by_search(float value) {
  const double magnitude = std::fabs(static_cast<double>(value));
  int best = 0;
  for (int code = 1; code < 0x7f; ++code) {
    const double off = std::fabs(fp8::from_e4m3(code) - magnitude);
    const double least = std::fabs(fp8::from_e4m3(best) - magnitude);
    if (off < least || (off == least && code % 2 == 0)) best = code;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

void test_codes() {
  std::mt19937 random(1);
  for (int code = 0; code < 256; ++code) {
    const float value = fp8::from_e4m3(code);
    const bool is_nan = (code & 0x7f) == 0x7f;
    expect(std::isnan(value) == is_nan, "NaN", code, value);
    if (!is_nan) expect(fp8::to_e4m3(value) == code, "a code through its value", code, value);
    if ((code & 0x7f) >= 0x7e) continue;
    const float tie = (value + fp8::from_e4m3(code + 1)) / 2;
    for (const float near : {tie, std::nextafter(tie, 0.0f), std::nextafter(tie, 2 * tie)}) {
      expect(fp8::to_e4m3(near) == nearest_by_search(near), "near a tie", near);
    }
  }
  for (int i = 0; i < 100'000; ++i) {
    const float value = std::ldexp(std::normal_distribution<float>()(random), i % 30 - 18);
    expect(fp8::to_e4m3(value) == nearest_by_search(value), "nearest", value);
  }
  const float infinity = std::numeric_limits<float>::infinity();
  expect(fp8::to_e4m3(infinity) == 0x7e && fp8::to_e4m3(-infinity) == 0xfe, "infinity");
  expect((fp8::to_e4m3(-std::nanf("")) & 0x7f) == 0x7f, "NaN to NaN");
}

struct F32 {
  using Stored = float;
  static float read(float value) { return value; }
};

std::vector<float> normal_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = std::ldexp(std::normal_distribution<float>()(random), i / 128 % 5);
  }
  return values;
}

void test_rows(int columns) {
  const std::vector<float> row = normal_values(columns, 2);
  std::vector<uint8_t> record(fp8::token_bytes(columns));
  std::vector<float> back(columns);
  quantize_row<F32>(row.data(), columns, record.data());
  dequantize_row(record.data(), columns, back.data());
  for (int i = 0; i < columns; ++i) {
    float amax = 0;
    for (int j = i / 128 * 128; j < i / 128 * 128 + 128 && j < columns; ++j)
      amax = std::fmax(amax, std::fabs(row[j]));
    const float expected = fp8::from_e4m3(fp8::to_e4m3(row[i] * (448 / amax))) * (amax / 448);
    expect(back[i] == expected, "a value through its record", back[i], expected);
  }
}

// A plane with one scale for each block, random codes but NaN.
struct Plane {
  int rows, columns;
  std::vector<uint8_t> bytes;

  Plane(int num_rows, int num_columns, uint32_t seed)
      : rows(num_rows), columns(num_columns), bytes(fp8::plane_bytes(num_rows, num_columns)) {
    std::mt19937 random(seed);
    for (uint8_t& code : bytes) code = random() % 0x7f | (random() & 0x80);
    for (int block = 0; block < fp8::num_blocks(rows) * fp8::num_blocks(columns); ++block) {
      const float scale = std::ldexp(1.0f + random() % 100 / 100.0f, -14 - block % 3);
      std::memcpy(&bytes[fp8::plane_values(rows, columns) + 4 * block], &scale, 4);
    }
  }
  double at(int row, int column) const {
    const int block = row / 128 * fp8::num_blocks(columns) + column / 128;
    float scale;
    std::memcpy(&scale, &bytes[fp8::plane_values(rows, columns) + 4 * block], 4);
    return static_cast<double>(fp8::from_e4m3(bytes[row * columns + column])) * scale;
  }
  std::vector<double> times(const std::vector<double>& x) const {
    std::vector<double> y(rows);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < columns; ++c) y[r] += at(r, c) * x[c];
    return y;
  }
};

constexpr int kRows = 101;

struct Expert {
  const int hidden, inner;
  Plane gate{inner, hidden, 3}, up{inner, hidden, 4}, down{hidden, inner, 5};
  std::vector<float> x = normal_values(kRows * hidden, 6);
  std::vector<float> gate_bias, up_bias, down_bias;  // empty for none
  Activation activation;

  Expert(int hidden_size, int inner_size) : hidden(hidden_size), inner(inner_size) {}

  // Rows [first, first + count) of x.
  std::vector<float> run(int first, int count) const {
    std::vector<float> y(count * hidden, std::nanf(""));
    std::vector<const void*> rows;
    std::vector<void*> out_rows;
    for (int i = 0; i < count; ++i) {
      rows.push_back(&x[(first + i) * hidden]);
      out_rows.push_back(&y[i * hidden]);
    }
    ExpertTile tile{};
    tile.rows = rows.data();
    tile.out_rows = out_rows.data();
    tile.num_rows = count;
    tile.gate = gate.bytes.data(), tile.up = up.bytes.data(), tile.down = down.bytes.data();
    if (!gate_bias.empty()) {
      tile.gate_bias = gate_bias.data(), tile.up_bias = up_bias.data();
      tile.down_bias = down_bias.data();
    }
    tile.hidden = hidden;
    tile.intermediate = inner;
    tile.dtype = DType::kF32;
    tile.weight_format = WeightFormat::kFloat8Block128;
    tile.activation = activation;
    const size_t bytes = expert_tile_scratch_bytes(hidden, inner, count, DType::kF32);
    auto* scratch = static_cast<std::byte*>(std::aligned_alloc(64, (bytes + 63) / 64 * 64));
    std::memset(scratch, 0xff, bytes);
    expert_tile(tile, scratch);
    std::free(scratch);
    return y;
  }

  // In double but for h's rounding.
  std::vector<double> exact(int row) const {
    const std::vector<double> in(&x[row * hidden], &x[row * hidden] + hidden);
    const std::vector<double> g = gate.times(in), u = up.times(in);
    std::vector<float> h(inner), rounded(inner);
    for (int i = 0; i < inner; ++i) {
      h[i] = gate_bias.empty()
                 ? apply_activation(activation, g[i], u[i])
                 : apply_activation(activation, g[i] + gate_bias[i], u[i] + up_bias[i]);
    }
    std::vector<uint8_t> record(fp8::token_bytes(inner));
    quantize_row<F32>(h.data(), inner, record.data());
    dequantize_row(record.data(), inner, rounded.data());
    std::vector<double> y = down.times({rounded.begin(), rounded.end()});
    for (int d = 0; d < hidden && !down_bias.empty(); ++d) y[d] += down_bias[d];
    return y;
  }
};

// One value of h on the other side of a tie moves an output by a 14th of the largest, times its
// weight: far less than the norm of the row.
void test_tile_is_right(const Expert& expert) {
  const std::vector<float> y = expert.run(0, 5);
  for (int row = 0; row < 5; ++row) {
    const std::vector<double> expected = expert.exact(row);
    double off = 0, norm = 0;
    for (int i = 0; i < expert.hidden; ++i) {
      off += std::pow(y[row * expert.hidden + i] - expected[i], 2);
      norm += std::pow(expected[i], 2);
    }
    expect(off <= 1e-4 * norm, "a row against double", std::sqrt(off), std::sqrt(norm));
  }
}

void test_bits(const Expert& expert, const std::vector<float>& expected) {
  for (const int height : {1, 2, 15, 33, 64, kRows}) {
    for (int first = 0; first < kRows; first += height) {
      const int count = first + height < kRows ? height : kRows - first;
      const std::vector<float> y = expert.run(first, count);
      expect(!std::memcmp(y.data(), &expected[first * expert.hidden], 4 * y.size()),
             "bits of a tile", height, first);
    }
  }
}

void test_expert(const Expert& expert) {
  set_gemm_isa("portable");
  const std::vector<float> expected = expert.run(0, kRows);
  for (const char* isa : {"portable", "neon", "avx2", "avx512"}) {
    if (!set_gemm_isa(isa)) continue;
    test_tile_is_right(expert);
    test_bits(expert, expected);
  }
}

void run() {
  test_codes();
  for (const int columns : {64, 192, 384}) test_rows(columns);
  for (const auto& [hidden, inner] : {std::pair{256, 384}, {192, 320}, {64, 64}}) {
    test_expert(Expert(hidden, inner));
  }
  Expert with_biases(192, 320);
  with_biases.gate_bias = normal_values(320, 7);
  with_biases.up_bias = normal_values(320, 8);
  with_biases.down_bias = normal_values(192, 9);
  for (const Activation& activation :
       {Activation{}, Activation{ActivationKind::kGeluTanh},
        Activation{ActivationKind::kClampedSwiglu, 7.0f, 1.702f, 1.0f}}) {
    with_biases.activation = activation;
    test_expert(with_biases);
  }
}

}  // namespace
}  // namespace iser::cpu

int main() {
  iser::cpu::run();
  if (iser::cpu::num_failed == 0) std::printf("fp8: all good\n");
  return iser::cpu::num_failed > 0;
}
