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

// The experts' planes among a call's operands: the device's first expert, of the first layer.
struct PlaneOperands {
  const uint8_t* data[kMaxPlanes] = {};
  int32_t num_stacked = 0;  // layers of a leading axis; 0 for none

  // Of the device's first expert in the layer, which must be below `num_stacked`.
  const uint8_t* at(const CallSizes& sizes, int32_t index, int32_t layer) const {
    const size_t experts = size_t{1} * sizes.ranks_per_device * sizes.shape.slots.num_home();
    const size_t layer_bytes = experts * sizes.shape.bundle().planes[index].bytes;
    return data[index] + (num_stacked > 0 ? layer * layer_bytes : 0);
  }
};

// One plane [V*H, ...], or a stack [L, V*H, ...] with L in `num_stacked`, which is 0 otherwise.
inline std::string check_plane(const CallSizes& sizes, int32_t index,
                               const xla::ffi::AnyBuffer& operand, int32_t* num_stacked) {
  using xla::ffi::DataType;
  const PlaneLayout plane = sizes.shape.bundle().planes[index];
  const std::string name = plane_name(index);
  constexpr DataType kTypes[] = {DataType::F32, DataType::BF16, DataType::U8};
  constexpr const char* kTypeNames[] = {"float32", "bfloat16", "uint8"};
  const int32_t type = static_cast<int32_t>(plane.type);
  if (operand.element_type() != kTypes[type]) {
    return name + " is not " + kTypeNames[type] +
           ", as the Domain's weight format has it; pass the handle of a Domain of the program's "
           "weight_format";
  }
  const auto dims = operand.dimensions();
  const size_t num_dims = static_cast<size_t>(plane.num_dims) + 1;
  const bool is_stacked = dims.size() == num_dims + 1;
  const size_t layers = is_stacked ? dims[0] : 1;
  if (layers < 1) return "weights are stacked over 0 layers; stack those of one layer or more";
  const size_t experts = size_t{1} * sizes.ranks_per_device * sizes.shape.slots.num_home();
  const size_t expected = layers * experts * plane.bytes;
  if (operand.size_bytes() != expected || (!is_stacked && dims.size() != num_dims)) {
    return name + " has " + std::to_string(dims.size()) + " axes and " +
           std::to_string(operand.size_bytes()) + " bytes, expected " + std::to_string(num_dims) +
           " axes, or one more for layers, and " + std::to_string(expected) +
           " bytes; pass the weights of a Domain of its sizes";
  }
  *num_stacked = is_stacked ? static_cast<int32_t>(layers) : 0;
  return "";
}

inline std::string read_planes(const CallSizes& sizes, const xla::ffi::RemainingArgs& operands,
                               PlaneOperands* planes) {
  const int32_t expected = sizes.shape.bundle().num_planes;
  if (operands.size() != static_cast<size_t>(expected)) {
    return "the call has " + std::to_string(operands.size()) +
           " arrays of weights, an expert has " + std::to_string(expected) +
           " planes; pass biases where the Domain was made with expert_biases=True, and only there";
  }
  for (int32_t i = 0; i < expected; ++i) {
    const auto operand = operands.get<xla::ffi::AnyBuffer>(i);
    if (!operand.has_value()) return std::string(plane_name(i)) + " is not an array";
    int32_t stacked = 0;
    const std::string error = check_plane(sizes, i, *operand, &stacked);
    if (!error.empty()) return error;
    if (i > 0 && stacked != planes->num_stacked) return "planes are stacked over different layers";
    planes->num_stacked = stacked;
    planes->data[i] = static_cast<const uint8_t*>(operand->untyped_data());
  }
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
auto with_start(Binding&& binding) {  // x, planes; ticket, x
  return with_call_operands(std::move(binding))
      .template Arg<xla::ffi::AnyBuffer>()
      .RemainingArgs()
      .template Ret<U32>()
      .template Ret<xla::ffi::AnyBuffer>();
}

template <typename Binding>
auto with_fused_moe(Binding&& binding) {  // ticket, x, topk_weights, after, planes; y, plan
  return with_plan_results(std::move(binding)
                               .template Arg<U32>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .template Arg<F32>()
                               .template Arg<xla::ffi::AnyBuffer>()
                               .RemainingArgs()
                               .template Ret<xla::ffi::AnyBuffer>());
}

// Error of a call: a text that begins by `IserError:`.
inline xla::ffi::Error failed(const std::string& text) {
  const bool is_ours = text.rfind("IserError:", 0) == 0;
  return xla::ffi::Error(xla::ffi::ErrorCode::kFailedPrecondition,
                         is_ours ? text : "IserError: " + text);
}

}  // namespace iser
