// The order in which weights are read: in chunks, each copied (bf16: widened) to scratch while the
// next one is fetched. Included by gemm_kernel.h alone.
#pragma once

#include <cstring>

#include "ffi/cpu/gemm_types.h"

namespace iser::cpu {
namespace {

// At most kRowsAtOnce weight rows of at most kBlockDepth values, row_stride values apart.
template <class Type>
struct Chunk {
  const typename Type::Storage* src;
  size_t row_stride;
  int num_rows;
  int depth;
  const float* scales;  // of E4M3: of the plane's first rows, at the chunk's first k
  int first_row;        // of the plane
  int padded_rows() const { return ceil_div(num_rows, Vec::kRowStep) * Vec::kRowStep; }
  // Of row m of the chunk from k on, a multiple of 128.
  float scale(int m, int k) const {
    const size_t stride = (row_stride + fp8::kBlock - 1) / fp8::kBlock;
    return scales[(first_row + m) / fp8::kBlock * stride + k / fp8::kBlock];
  }
};

// Rows [first_row, first_row + num_rows()) of one plane, or of two planes of the same shape, and
// the order in which their chunks are multiplied: by k, then plane, then rows.
template <class Type>
struct WeightBlock {
  const typename Type::Storage* planes[2];
  int num_planes;
  int plane_rows;
  int depth;
  int first_row;

  int num_rows() const { return min_of(kBlockRows / num_planes, plane_rows - first_row); }
  bool is_empty() const { return first_row >= plane_rows; }
  WeightBlock next() const {
    WeightBlock block = *this;
    block.first_row += num_rows();
    return block;
  }
  int row_chunks() const { return ceil_div(num_rows(), kRowsAtOnce); }
  int num_chunks() const { return ceil_div(depth, kBlockDepth) * num_planes * row_chunks(); }
  // Rows of sums that a plane takes; the second plane's follow the first's.
  int padded_rows() const { return ceil_div(num_rows(), Vec::kRowStep) * Vec::kRowStep; }
  // The plane of the i-th chunk, its first row within the block and its first k.
  int plane(int i) const { return i / row_chunks() % num_planes; }
  int row(int i) const { return i % row_chunks() * kRowsAtOnce; }
  int k(int i) const { return i / (row_chunks() * num_planes) * kBlockDepth; }
  Chunk<Type> chunk(int i) const {
    const size_t offset = static_cast<size_t>(first_row + row(i)) * depth + k(i);
    const auto* of_plane = planes[plane(i)];
    const float* scales = scales_of<Type>(of_plane, plane_rows, depth);
    return {of_plane + offset,
            static_cast<size_t>(depth),
            min_of(kRowsAtOnce, num_rows() - row(i)),
            min_of(kBlockDepth, depth - k(i)),
            scales ? scales + k(i) / fp8::kBlock : nullptr,
            first_row + row(i)};
  }
};

// Asks for the next chunk's lines in `num_steps` steps while the current one is multiplied;
// otherwise waiting for them takes a fifth of the time.
class Prefetcher {
 public:
  template <class Type>
  Prefetcher(const Chunk<Type>& chunk, int num_steps)
      : row_(reinterpret_cast<const char*>(chunk.src)),
        stride_(chunk.row_stride * sizeof(*chunk.src)),
        depth_(chunk.depth * sizeof(*chunk.src)),
        rows_left_(chunk.num_rows),
        lines_a_step_(
            ceil_div(chunk.num_rows * ceil_div(static_cast<int>(depth_), kLine), num_steps)) {}
  void step() {
    for (int i = 0; i < lines_a_step_; ++i) next_line();
  }

 private:
  static constexpr int kLine = 64;
  void next_line() {
    if (rows_left_ == 0) return;
    __builtin_prefetch(row_ + offset_, 0, 3);
    offset_ += kLine;
    if (offset_ < depth_) return;
    offset_ = 0;
    row_ += stride_;
    --rows_left_;
  }

  const char* row_;
  size_t stride_, depth_, offset_ = 0;
  int rows_left_, lines_a_step_;
};

// dst[m][0:depth] = chunk[m][0:depth] in f32; rows past num_rows are zero.
template <class Type>
void copy_weights(const Chunk<Type>& chunk, float* dst) {
  for (int m = 0; m < chunk.padded_rows(); ++m, dst += kWeightStride) {
    if (m >= chunk.num_rows) {
      memset(dst, 0, sizeof(float) * chunk.depth);
      continue;
    }
    const auto* row = chunk.src + m * chunk.row_stride;
    int k = 0;
    for (; k + kLanes <= chunk.depth; k += kLanes) Vec::store(dst + k, Type::load(row + k));
    for (; k < chunk.depth; ++k) dst[k] = Type::widen(row[k]);
  }
}

// value * scale; the last block of a row may be short.
template <>
inline void copy_weights(const Chunk<E4M3>& chunk, float* dst) {
  for (int m = 0; m < chunk.padded_rows(); ++m, dst += kWeightStride) {
    if (m >= chunk.num_rows) {
      memset(dst, 0, sizeof(float) * chunk.depth);
      continue;
    }
    const uint8_t* row = chunk.src + m * chunk.row_stride;
    for (int k0 = 0; k0 < chunk.depth; k0 += fp8::kBlock) {
      const float scale = chunk.scale(m, k0);
      const int k1 = min_of(chunk.depth, k0 + fp8::kBlock);
      for (int k = k0; k < k1; ++k) dst[k] = E4M3::widen(row[k]) * scale;
    }
  }
}

}  // namespace
}  // namespace iser::cpu
