// XLA FFI calls on platform CUDA: `start`, `fused_moe` and `plan`. They enqueue and return: which
// Domain a call meets is read from its operand on the device.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <string>

#include "ffi/bindings/bindings.h"
#include "ffi/bindings/checks.h"
#include "ffi/cuda/device.cuh"
#include "ffi/cuda/shared_expert.cuh"
#include "ffi/cuda/start.cuh"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace iser {
namespace {

using cuda::DeviceRuntime;
using cuda::DomainSetup;
using cuda::PlanOutputs;

// What a call is enqueued with; its GPU is current meanwhile.
struct Target {
  const cuda::OnDevice here;
  DeviceRuntime* const runtime;
  const DomainSetup* const setup;
  CallSizes sizes{};
  std::string error;

  Target(int32_t ordinal, int64_t config, size_t num_words)
      : here(ordinal),
        runtime(cuda::find_device(ordinal)),
        setup(cuda::find_setup(static_cast<uint64_t>(config))) {
    if (!runtime || !setup) {
      error = "GPU " + std::to_string(ordinal) +
              " has seen no Domain of the configuration that the program was compiled for; "
              "make the Domain in the process that runs the program";
      return;
    }
    error = cuda::cuda_text(here.error(), "choosing the GPU");
    if (num_words != kNumHandleWords) error = "the domain operand is not a handle's row";
    sizes = {setup->shape, setup->plan.max_broadcasts(), setup->ranks_per_device, setup->num_layers,
             setup->dtype == cuda::DType::kBF16};
  }
};

// Enqueues one step after the other until one fails.
struct Steps {
  std::string error;

  template <typename Step>
  Steps& then(const char* what, Step step) {
    if (error.empty()) error = cuda::cuda_text(step(), what);
    return *this;
  }
  ffi::Error result() const { return error.empty() ? ffi::Error::Success() : failed(error); }
};

// The next cell of the ring, free for MAIN to write once the call that had it has been copied.
uint32_t take_cell(DeviceRuntime& runtime, cudaStream_t main, Steps& steps) {
  const uint32_t index = runtime.num_calls++ % DeviceRuntime::kNumCells;
  steps.then("waiting for a cell",
             [&] { return cudaStreamWaitEvent(main, runtime.copied[index], 0); });
  return index;
}

void record_left(DeviceRuntime& runtime, cudaStream_t main, Steps& steps) {
  steps.then("recording the call", [&] { return cudaEventRecord(runtime.left, main); });
}

// For tests: NaN wherever fused_moe writes.
void poison(const DomainSetup& setup, const cuda::FusedLaunch& launch, cudaStream_t main,
            Steps& steps) {
  const size_t rows = size_t{1} * setup.ranks_per_device * launch.num_tokens;
  const size_t scratch = cuda::workspace_bytes(setup, launch.num_tokens);
  steps
      .then("poisoning y",
            [&] { return cudaMemsetAsync(launch.y, 0xff, rows * setup.shape.row_bytes(), main); })
      .then("poisoning the workspace",
            [&] { return cudaMemsetAsync(launch.workspace, 0xff, scratch, main); })
      .then("poisoning the Domain", [&] {
        return cuda::launch_poison(
            {launch.directory, launch.ticket, launch.sizes, setup.ranks_per_device}, main);
      });
}

// What start and plan share: the launch on MAIN, and the plan's but for where its arrays are.
std::string read_call(const Target& target, int64_t config, const U32& handle, const I32& params,
                      const I32& topk_ids, cuda::StartLaunch* start, cuda::PlanLaunch* plan) {
  const CallSizes& sizes = target.sizes;
  plan->config = target.setup->plan;
  plan->top_k = sizes.shape.top_k;
  start->directory = target.runtime->directory;
  start->handle = handle.typed_data();
  start->sizes = static_cast<uint64_t>(config);
  start->params = params.typed_data();
  start->topk_ids = topk_ids.typed_data();
  start->num_routes = static_cast<int64_t>(topk_ids.element_count());
  const std::string error =
      count_tokens(sizes, topk_ids.dimensions(), sizes.shape.top_k, "topk_ids", &plan->num_tokens);
  return error.empty() ? check_size("params", params.element_count(), 3) : error;
}

// MAIN keeps the operands and goes on; COPY plans, copies, and says READY.
void enqueue_start(DeviceRuntime& runtime, const DomainSetup& setup, cuda::StartLaunch& start,
                   cuda::PlanLaunch& plan, cudaStream_t main, Steps& steps) {
  const uint32_t index = take_cell(runtime, main, steps);
  plan.cell = start.cell = runtime.cells + index;
  const cudaStream_t copy = runtime.copy;
  steps.then("launching start", [&] { return cuda::launch_start(start, main); })
      .then("recording start", [&] { return cudaEventRecord(runtime.started, main); })
      .then("waiting for start", [&] { return cudaStreamWaitEvent(copy, runtime.started, 0); })
      .then("launching plan", [&] { return cuda::launch_plan(setup.grid, plan, copy); })
      .then("recording the plan", [&] { return cudaEventRecord(runtime.planned[index], copy); })
      .then("launching replication",
            [&] {
              return cuda::launch_replication({plan.cell, setup.shape, setup.replication}, copy);
            })
      .then("recording the copies", [&] { return cudaEventRecord(runtime.copied[index], copy); });
  record_left(runtime, main, steps);
  if (!steps.error.empty()) return;
  // One that never gets its fused_moe, because its program failed in between, makes room in the
  // end.
  if (runtime.in_flight.size() == DeviceRuntime::kNumCells) {
    runtime.in_flight.erase(runtime.in_flight.begin());
  }
  runtime.in_flight.push_back({start.ticket, index});
}

// MAIN waits for the plan of the call that wrote this ticket. A ticket that XLA has copied stands
// at another address: then MAIN waits for the youngest plan, since COPY plans in order.
void wait_planned(DeviceRuntime& runtime, const void* ticket, cudaStream_t main, Steps& steps) {
  auto& calls = runtime.in_flight;
  if (calls.empty()) {
    steps.error =
        "no start is in flight; call fused_moe with the ticket of a start, and use each ticket "
        "once";
    return;
  }
  const auto found = std::find_if(calls.rbegin(), calls.rend(),
                                  [&](const auto& call) { return call.ticket == ticket; });
  const uint32_t cell = found == calls.rend() ? calls.back().cell : found->cell;
  if (found != calls.rend()) calls.erase(std::next(found).base());
  steps.then("waiting for the plan",
             [&] { return cudaStreamWaitEvent(main, runtime.planned[cell], 0); });
}

ffi::Error fused_moe(cudaStream_t main, int32_t ordinal, U32 ticket, ffi::AnyBuffer x,
                     F32 topk_weights, ffi::AnyBuffer after, ffi::RemainingArgs operands,
                     Out<ffi::AnyBuffer> y, Out<I32> route_slot, Out<I32> broadcasts,
                     Out<I32> quota, Out<I32> num_broadcasts, Out<I32> load_before, Out<I32> load,
                     Out<I32> status, Out<U32> generation, Out<ffi::AnyBuffer> workspace,
                     int64_t config) {
  (void)after;  // an operand only so that it is computed before this call
  const Target target(ordinal, config, ticket.element_count());
  if (!target.error.empty()) return failed(target.error);
  const CallSizes& sizes = target.sizes;
  const DomainSetup& setup = *target.setup;
  const PlanBuffers plan{route_slot,  broadcasts, quota,  num_broadcasts,
                         load_before, load,       status, generation};
  PlaneOperands planes;
  int32_t num_tokens = 0;
  std::string error = count_tokens(sizes, x.dimensions(), sizes.shape.hidden, "x", &num_tokens);
  if (error.empty()) error = check_fused(sizes, num_tokens, x, topk_weights, *y, plan);
  if (error.empty()) {
    error =
        check_size("workspace", workspace->size_bytes(), cuda::workspace_bytes(setup, num_tokens));
  }
  if (error.empty()) error = read_planes(sizes, operands, &planes);
  if (!error.empty()) return failed(error);
  DeviceRuntime& runtime = *target.runtime;
  cuda::FusedLaunch launch{};
  launch.directory = runtime.directory;
  launch.ticket = ticket.typed_data();
  launch.sizes = static_cast<uint64_t>(config);
  launch.shape = setup.shape;
  launch.ranks_per_device = setup.ranks_per_device;
  launch.num_tokens = num_tokens;
  launch.max_routes_per_rank = static_cast<int32_t>(setup.max_routes_per_rank);
  launch.dtype = setup.dtype;
  launch.x = x.untyped_data();
  launch.topk_weights = topk_weights.typed_data();
  std::copy_n(planes.data, kMaxPlanes, launch.weights);
  launch.num_stacked = planes.num_stacked;
  launch.y = y->untyped_data();
  launch.plan = plan.outputs<PlanOutputs>();
  launch.workspace = workspace->untyped_data();
  launch.options = setup.fused;
  std::lock_guard lock(runtime.mutex);
  Steps steps;
  wait_planned(runtime, launch.ticket, main, steps);
  if (setup.poison) poison(setup, launch, main, steps);
  steps.then("launching fused_moe", [&] { return cuda::launch_fused(launch, main); });
  record_left(runtime, main, steps);
  return steps.result();
}

ffi::Error start(cudaStream_t main, int32_t ordinal, U32 handle, I32 params, I32 topk_ids,
                 ffi::AnyBuffer x, ffi::RemainingArgs operands, Out<U32> ticket,
                 Out<ffi::AnyBuffer> x_out, int64_t config) {
  const Target target(ordinal, config, handle.element_count());
  if (!target.error.empty()) return failed(target.error);
  cuda::StartLaunch start{};
  cuda::PlanLaunch plan{};
  PlaneOperands planes;
  std::string error = read_call(target, config, handle, params, topk_ids, &start, &plan);
  if (error.empty()) error = check_size("ticket", ticket->element_count(), kNumHandleWords);
  if (error.empty()) error = check_size("x_out", x_out->size_bytes(), x.size_bytes());
  if (error.empty()) error = read_planes(target.sizes, operands, &planes);
  if (!error.empty()) return failed(error);
  std::copy_n(planes.data, kMaxPlanes, plan.weights);
  start.num_stacked = planes.num_stacked;
  plan.is_stacked = start.num_stacked > 0;
  start.ticket = ticket->typed_data();
  std::lock_guard lock(target.runtime->mutex);
  Steps steps;
  enqueue_start(*target.runtime, *target.setup, start, plan, main, steps);
  // x passes through so that what reads it is ordered behind this call; XLA aliases the two.
  if (x_out->untyped_data() != x.untyped_data() && x.size_bytes() > 0) {
    steps.then("copying x", [&] {
      return cudaMemcpyAsync(x_out->untyped_data(), x.untyped_data(), x.size_bytes(),
                             cudaMemcpyDeviceToDevice, main);
    });
  }
  return steps.result();
}

ffi::Error plan(cudaStream_t main, int32_t ordinal, U32 handle, I32 params, I32 topk_ids,
                Out<I32> route_slot, Out<I32> broadcasts, Out<I32> quota, Out<I32> num_broadcasts,
                Out<I32> load_before, Out<I32> load, Out<I32> status, Out<U32> generation,
                int64_t config) {
  const Target target(ordinal, config, handle.element_count());
  if (!target.error.empty()) return failed(target.error);
  cuda::StartLaunch start{};
  cuda::PlanLaunch plan{};
  const PlanBuffers buffers{route_slot,  broadcasts, quota,  num_broadcasts,
                            load_before, load,       status, generation};
  std::string error = read_call(target, config, handle, params, topk_ids, &start, &plan);
  if (error.empty()) error = buffers.check(target.sizes, plan.num_tokens);
  if (!error.empty()) return failed(error);
  plan.topk_ids = topk_ids.typed_data();
  plan.is_plan_only = start.is_plan_only = 1;
  plan.outputs = buffers.outputs<PlanOutputs>();
  DeviceRuntime& runtime = *target.runtime;
  std::lock_guard lock(runtime.mutex);
  Steps steps;
  const uint32_t index = take_cell(runtime, main, steps);
  plan.cell = start.cell = runtime.cells + index;
  steps.then("launching start", [&] { return cuda::launch_start(start, main); })
      .then("launching plan", [&] { return cuda::launch_plan(target.setup->grid, plan, main); })
      .then("recording the plan", [&] { return cudaEventRecord(runtime.copied[index], main); });
  record_left(runtime, main, steps);
  return steps.result();
}

// x [..., D]; gate, up [I, D]; down [D, I].
ffi::Error shared_expert(cudaStream_t main, int32_t ordinal, ffi::AnyBuffer x, ffi::AnyBuffer gate,
                         ffi::AnyBuffer up, ffi::AnyBuffer down, Out<ffi::AnyBuffer> y,
                         Out<ffi::AnyBuffer> scratch, int64_t num_sms, int32_t kind, float limit,
                         float alpha, float offset) {
  const cuda::OnDevice here(ordinal);
  DeviceRuntime* runtime = cuda::find_device(ordinal);
  if (!runtime || !runtime->cublas) {
    return failed("GPU " + std::to_string(ordinal) +
                  " has no cuBLAS handle; trace shared_expert in the process that runs it");
  }
  const bool is_bf16 = x.element_type() == ffi::DataType::BF16;
  const auto shape = gate.dimensions();
  if (!is_bf16 && x.element_type() != ffi::DataType::F32) return failed("x is not bf16 or f32");
  if (shape.size() != 2 || shape[1] == 0) return failed("gate is not [I, D]");
  const size_t weight_bytes = gate.size_bytes();
  std::string error = check_size("up", up.size_bytes(), weight_bytes);
  if (error.empty()) error = check_size("down", down.size_bytes(), weight_bytes);
  if (error.empty()) error = check_size("y", y->size_bytes(), x.size_bytes());
  for (const ffi::AnyBuffer* plane : {&gate, &up, &down}) {
    if (plane->element_type() != x.element_type()) error = "a plane's dtype differs from x's";
  }
  const int64_t tokens = static_cast<int64_t>(x.element_count()) / shape[1];
  const cuda::DType dtype = is_bf16 ? cuda::DType::kBF16 : cuda::DType::kF32;
  if (error.empty()) {
    error = check_size("scratch", scratch->size_bytes(),
                       cuda::shared_expert_bytes(tokens, shape[0], dtype));
  }
  if (kind < 0 || kind >= kNumActivationKinds) error = "kind names no activation";
  if (tokens > INT32_MAX || shape[0] > INT32_MAX || shape[1] > INT32_MAX) error = "too many tokens";
  if (!error.empty()) return failed(error);
  const cuda::SharedExpertLaunch launch{x.untyped_data(),
                                        gate.untyped_data(),
                                        up.untyped_data(),
                                        down.untyped_data(),
                                        y->untyped_data(),
                                        scratch->untyped_data(),
                                        static_cast<int32_t>(tokens),
                                        static_cast<int32_t>(shape[1]),
                                        static_cast<int32_t>(shape[0]),
                                        dtype,
                                        static_cast<int32_t>(num_sms),
                                        {static_cast<ActivationKind>(kind), limit, alpha, offset}};
  std::lock_guard lock(runtime->mutex);
  error = cuda::launch_shared_expert(runtime->cublas, launch, main);
  return error.empty() ? ffi::Error::Success() : failed(error);
}

auto bind_stream() {
  return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>();
}

XLA_FFI_DEFINE_HANDLER(kStart, start, with_start(bind_stream()).Attr<int64_t>("config"));
XLA_FFI_DEFINE_HANDLER(kFusedMoe, fused_moe,
                       with_fused_moe(bind_stream()).Ret<ffi::AnyBuffer>().Attr<int64_t>("config"));
XLA_FFI_DEFINE_HANDLER(kPlan, plan, with_plan(bind_stream()).Attr<int64_t>("config"));
XLA_FFI_DEFINE_HANDLER(kSharedExpert, shared_expert,
                       bind_stream()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Arg<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Ret<ffi::AnyBuffer>()
                           .Attr<int64_t>("num_sms")
                           .Attr<int32_t>("kind")
                           .Attr<float>("limit")
                           .Attr<float>("alpha")
                           .Attr<float>("offset"));

}  // namespace

void bind_cuda_calls(nb::module_& m) {
  m.def("cuda_calls", [] {
    nb::dict calls;
    calls["start"] = capsule_of(kStart);
    calls["fused_moe"] = capsule_of(kFusedMoe);
    calls["shared_expert"] = capsule_of(kSharedExpert);
    calls["plan"] = capsule_of(kPlan);
    return calls;
  });
}

}  // namespace iser
