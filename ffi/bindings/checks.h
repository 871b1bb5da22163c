// What the calls of every platform check before they touch a buffer: each returns an error's text,
// empty where all is well.
#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "ffi/core/haloq.h"
#include "ffi/core/layout.h"
#include "xla/ffi/api/ffi.h"

namespace iser {

using I32 = xla::ffi::Buffer<xla::ffi::DataType::S32>;
using U32 = xla::ffi::Buffer<xla::ffi::DataType::U32>;
using F32 = xla::ffi::Buffer<xla::ffi::DataType::F32>;
template <typename B>
using Out = xla::ffi::Result<B>;

// Handle and ticket words, u32: [domain id, first rank of the device, mark, generation]; on GPUs
// the last is unused.
constexpr size_t kNumHandleWords = 4;

// Of the Domain that a call meets, or on a GPU of the Domains that its program was compiled for.
struct CallSizes {
  DomainShape shape;
  int32_t max_broadcasts;
  int32_t ranks_per_device;
  int32_t num_layers;
  bool is_bf16;
};

// Programs are compiled for a configuration, but the words say which Domain they meet: an error
// where a buffer is not as long as that Domain reads or writes.
inline std::string check_size(const char* name, size_t found, size_t expected) {
  if (found == expected) return "";
  return std::string(name) + " has " + std::to_string(found) + " bytes, the Domain expects " +
         std::to_string(expected) +
         ": the program was compiled for other sizes; pass the handle of a Domain of its sizes";
}

inline std::string check_dtype(const CallSizes& sizes, const char* name, xla::ffi::DataType found) {
  using xla::ffi::DataType;
  if (found == (sizes.is_bf16 ? DataType::BF16 : DataType::F32)) return "";
  return std::string(name) + " is not " + (sizes.is_bf16 ? "bfloat16" : "float32") +
         ", the Domain's dtype; pass the handle of a Domain of the program's dtype";
}

// Tokens of one rank of a [V * tokens, width] operand.
inline std::string count_tokens(const CallSizes& sizes, xla::ffi::Span<const int64_t> dims,
                                int64_t width, const char* name, int32_t* num_tokens) {
  const int64_t ranks = sizes.ranks_per_device;
  if (dims.size() != 2 || dims[1] != width || dims[0] % ranks != 0) {
    return std::string(name) + " is not [" + std::to_string(ranks) + " ranks x tokens, " +
           std::to_string(width) + "]";
  }
  if (dims[0] / ranks > sizes.shape.max_tokens) {
    return std::to_string(dims[0] / ranks) +
           " tokens per rank exceed the Domain's max_tokens_per_rank=" +
           std::to_string(sizes.shape.max_tokens) + "; make a larger Domain";
  }
  *num_tokens = static_cast<int32_t>(dims[0] / ranks);
  return "";
}

// Plane `index` [V*H, a, b], with FP8 [V*H, bytes], or a stack [L, V*H, ...] with L in
// `num_stacked`, which is 0 otherwise.
inline std::string check_plane(const CallSizes& sizes, int32_t index,
                               const xla::ffi::AnyBuffer& plane, int32_t* num_stacked) {
  const int64_t experts = int64_t{sizes.ranks_per_device} * sizes.shape.slots.num_home();
  const size_t bytes = experts * sizes.shape.bundle().planes[index].bytes;
  const bool is_fp8 = sizes.shape.is_fp8();
  std::string error;
  if (!is_fp8) error = check_dtype(sizes, "a plane of the weights", plane.element_type());
  if (is_fp8 && plane.element_type() != xla::ffi::DataType::U8) {
    error =
        "a plane of the weights is not uint8, but the Domain's weights are FP8; pass those of "
        "jax_iser.quantize_fp8";
  }
  if (!error.empty()) return error;
  const auto dims = plane.dimensions();
  const size_t num_dims = is_fp8 ? 2 : 3;
  const bool is_stacked = dims.size() == num_dims + 1;
  const int64_t layers = is_stacked ? dims[0] : 1;
  if (layers < 1) return "weights are stacked over 0 layers; stack those of one layer or more";
  if (plane.size_bytes() != layers * bytes || (!is_stacked && dims.size() != num_dims)) {
    return "weights hold " + std::to_string(plane.size_bytes()) + " bytes a plane, expected " +
           std::to_string(layers * bytes);
  }
  *num_stacked = is_stacked ? static_cast<int32_t>(layers) : 0;
  return "";
}

// The plan's arrays among a call's results; `num_tokens` of one rank.
struct PlanBuffers {
  Out<I32>&route_slot, &broadcasts, &quota, &num_broadcasts, &load_before, &load, &status;
  Out<U32>& generation;

  std::string check(const CallSizes& sizes, int32_t num_tokens) const {
    const size_t word = sizeof(int32_t), ranks = sizes.shape.slots.num_ranks;
    const size_t rows = sizes.max_broadcasts;
    const size_t routes = size_t{1} * sizes.ranks_per_device * num_tokens * sizes.shape.top_k;
    const std::pair<const char*, std::pair<size_t, size_t>> expected[] = {
        {"route_slot", {route_slot->size_bytes(), word * routes}},
        {"broadcasts", {broadcasts->size_bytes(), word * rows * 6}},
        {"quota", {quota->size_bytes(), word * rows * ranks}},
        {"num_broadcasts", {num_broadcasts->size_bytes(), word}},
        {"load_before", {load_before->size_bytes(), word * ranks}},
        {"load", {load->size_bytes(), word * ranks}},
        {"status", {status->size_bytes(), word}},
        {"generation", {generation->size_bytes(), word}}};
    for (const auto& [name, size] : expected) {
      const std::string error = check_size(name, size.first, size.second);
      if (!error.empty()) return error;
    }
    return "";
  }

  template <typename PlanOutputs>
  PlanOutputs outputs() const {
    return {route_slot->typed_data(),     broadcasts->typed_data(),  quota->typed_data(),
            num_broadcasts->typed_data(), load_before->typed_data(), load->typed_data(),
            status->typed_data(),         generation->typed_data()};
  }
};

// What fused_moe takes and gives beside weights and plan; `num_tokens` of one rank.
inline std::string check_fused(const CallSizes& sizes, int32_t num_tokens,
                               const xla::ffi::AnyBuffer& x, const F32& topk_weights,
                               const xla::ffi::AnyBuffer& y, const PlanBuffers& plan) {
  const size_t routes = size_t{1} * sizes.ranks_per_device * num_tokens * sizes.shape.top_k;
  std::string error = check_dtype(sizes, "x", x.element_type());
  if (error.empty()) error = check_size("y", y.size_bytes(), x.size_bytes());
  if (error.empty()) {
    error = check_size("topk_weights", topk_weights.size_bytes(), routes * sizeof(float));
  }
  return error.empty() ? plan.check(sizes, num_tokens) : error;
}

// Operands and results of the calls, alike on every platform; contexts come before them, and what
// a platform adds behind them, then the digest of the configuration.
template <typename Binding>
auto with_plan_results(Binding&& binding) {
  return std::move(binding)
      .template Ret<I32>()
      .template Ret<I32>()
      .template Ret<I32>()
      .template Ret<I32>()
      .template Ret<I32>()
      .template Ret<I32>()
      .template Ret<I32>()
      .template Ret<U32>();
}

template <typename Binding>
auto with_call_operands(Binding&& binding) {  // handle, params, topk_ids
  return std::move(binding).template Arg<U32>().template Arg<I32>().template Arg<I32>();
}

template <typename Binding>
auto with_plan(Binding&& binding) {
  return with_plan_results(with_call_operands(std::move(binding)));
}

template <typename Binding>
auto with_start(Binding&& binding) {  // x, gate, up, down; ticket, x
  return with_call_operands(std::move(binding))
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Arg<xla::ffi::AnyBuffer>()
      .template Ret<U32>()
      .template Ret<xla::ffi::AnyBuffer>();
}

template <typename Binding>
auto with_fused_moe(Binding&& binding) {  // ticket, x, topk_weights, gate, up, down, after; y, plan
  return with_plan_results(std::move(binding)
                               .template Arg<U32>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .template Arg<F32>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .template Ret<xla::ffi::AnyBuffer>());
}

// Error of a call: a text that begins by `IserError:`.
inline xla::ffi::Error failed(const std::string& text) {
  const bool is_ours = text.rfind("IserError:", 0) == 0;
  return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition,
                         is_ours ? text : "IserError: " + text);
}

}  // namespace iser
