// XLA FFI calls on platform cpu: `start`, `fused_moe` and `plan`. Each checks its operands against
// the Domain that its handle names, and hands over.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <utility>

#include "ffi/bindings/bindings.h"
#include "ffi/bindings/checks.h"
#include "ffi/bindings/registry.h"
#include "xla/ffi/api/ffi.h"

namespace nb = nanobind;
namespace ffi = xla::ffi;

namespace iser {
namespace {

using cpu::Device;
using cpu::Domain;
using cpu::FusedCall;
using cpu::Invocation;
using cpu::PlanOutputs;
using cpu::StartCall;

// Differs from process to process: words that outlived theirs, in a saved state say, name nothing.
uint32_t process_mark() {
  static const uint32_t mark = std::random_device()();
  return mark;
}

// Where in a compiled program a call stands: made once an executable, the same on all its devices.
struct CallSite {
  static ffi::TypeId id;
  uint64_t number;
};
ffi::TypeId CallSite::id = {};
ffi::TypeInfo call_site_info = ffi::MakeTypeInfo<CallSite>();

ffi::ErrorOr<std::unique_ptr<CallSite>> instantiate() {
  static std::atomic<uint64_t> next{1};
  return std::make_unique<CallSite>(CallSite{next.fetch_add(1)});
}

CallSizes sizes_of(const Domain& domain) {
  const cpu::DomainOptions& options = domain.options;
  return {options.shape, options.plan_config().max_broadcasts(), options.ranks_per_device,
          options.num_layers, options.dtype == cpu::DType::kBF16};
}

struct Target {
  std::shared_ptr<Domain> domain;
  Device* device = nullptr;
  std::string error;
};

// `sizes` is the digest of the configuration that the program was compiled for.
Target find_target(const uint32_t* words, size_t count, int64_t sizes) {
  if (count != kNumHandleWords || words[2] != process_mark()) {
    return {nullptr, nullptr,
            "the domain operand is not a handle of this process; pass domain.handle, sharded over "
            "its axis, as an argument of the program (and attach a restored model again)"};
  }
  std::shared_ptr<Domain> domain = find_domain(words[0]);
  if (!domain) {
    return {nullptr, nullptr,
            "Domain " + std::to_string(words[0]) +
                " is closed, or was released because nothing kept it: attach the open Domain "
                "again (jax_iser.nnx.attach(model, domain)), or pass its handle as an argument of "
                "the program, not as a constant captured by it"};
  }
  if (std::string error = forked_text(*domain); !error.empty()) return {nullptr, nullptr, error};
  Device* device = domain->device_of(static_cast<int32_t>(words[1]));
  if (!device) {
    return {nullptr, nullptr,
            "rank " + std::to_string(words[1]) + " of Domain " + std::to_string(words[0]) +
                " is not served by this process"};
  }
  if (domain->options.sizes != static_cast<uint64_t>(sizes)) {
    return {nullptr, nullptr,
            "the program was compiled for a Domain of another configuration than Domain " +
                std::to_string(words[0]) + " has; pass the handle of a Domain of its sizes"};
  }
  if (domain->has_failed()) return {nullptr, nullptr, domain->error_text()};
  return {std::move(domain), device, ""};
}

// The device's first expert of `layer` in each plane.
std::string planes_of(const CallSizes& sizes, const ffi::RemainingArgs& operands, int32_t layer,
                      const uint8_t* (&weights)[kMaxPlanes]) {
  PlaneOperands planes;
  const std::string error = read_planes(sizes, operands, &planes);
  if (!error.empty()) return error;
  if (planes.num_stacked > 0 && layer >= planes.num_stacked) {
    return "layer " + std::to_string(layer) + " is outside the " +
           std::to_string(planes.num_stacked) +
           " stacked layers; pass weights stacked over all layers, or a lower layer";
  }
  for (int32_t i = 0; i < sizes.shape.bundle().num_planes; ++i) {
    weights[i] = planes.at(sizes, i, layer);
  }
  return "";
}

// What `start` and `plan` share; params are i32 [3]: layer, weights_version, is_balanced.
std::string read_call(const CallSizes& sizes, const I32& params, const I32& topk_ids,
                      StartCall* call) {
  if (params.element_count() != 3) return "params is not i32[3]";
  const int32_t* values = params.typed_data();
  if (values[0] < 0 || values[0] >= sizes.num_layers) {
    return "layer " + std::to_string(values[0]) +
           " is outside the Domain's num_layers=" + std::to_string(sizes.num_layers) +
           "; make the Domain with a larger num_layers, or number the layers from 0";
  }
  call->layer = values[0];
  call->weights_version = values[1];
  call->is_balanced = values[2] != 0;
  call->topk_ids = topk_ids.typed_data();
  return count_tokens(sizes, topk_ids.dimensions(), sizes.shape.top_k, "topk_ids",
                      &call->num_tokens);
}

ffi::Error start(ffi::RunId run, CallSite* site, U32 handle, I32 params, I32 topk_ids,
                 ffi::AnyBuffer x, ffi::RemainingArgs planes, Out<U32> ticket,
                 Out<ffi::AnyBuffer> x_out, int64_t config) {
  const Target target = find_target(handle.typed_data(), handle.element_count(), config);
  if (!target.error.empty()) return failed(target.error);
  Domain& domain = *target.domain;
  const CallSizes sizes = sizes_of(domain);
  StartCall call{};
  std::string error = read_call(sizes, params, topk_ids, &call);
  if (error.empty()) error = check_size("x_out", x_out->size_bytes(), x.size_bytes());
  if (error.empty()) error = check_size("ticket", ticket->element_count(), kNumHandleWords);
  if (error.empty()) error = planes_of(sizes, planes, call.layer, call.weights);
  if (!error.empty()) return failed(error);
  uint32_t* words = ticket->typed_data();
  std::copy_n(handle.typed_data(), kNumHandleWords, words);
  words[3] = target.device->start({run.run_id, site->number}, call, {}, nullptr);
  // x passes through so that what reads it is ordered behind this call; XLA aliases the two.
  if (x_out->untyped_data() != x.untyped_data() && x.size_bytes() > 0) {
    std::memcpy(x_out->untyped_data(), x.untyped_data(), x.size_bytes());
  }
  return ffi::Error::Success();
}

ffi::Future failed_future(const std::string& text) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(failed(text));
  return future;
}

// Completes the promise, from a thread of the device's own: what follows in the program runs there.
cpu::Done completion(const ffi::Promise& promise) {
  return [promise = ffi::Promise(promise)](const std::string& error) mutable {
    error.empty() ? promise.SetAvailable() : promise.SetError(failed(error));
  };
}

ffi::Future fused_moe(U32 ticket, ffi::AnyBuffer x, F32 topk_weights, ffi::AnyBuffer after,
                      ffi::RemainingArgs planes, Out<ffi::AnyBuffer> y, Out<I32> route_slot,
                      Out<I32> broadcasts, Out<I32> quota, Out<I32> num_broadcasts,
                      Out<I32> load_before, Out<I32> load, Out<I32> status, Out<U32> generation,
                      int64_t config) {
  (void)after;  // an operand only so that it is computed before this call
  const Target target = find_target(ticket.typed_data(), ticket.element_count(), config);
  if (!target.error.empty()) return failed_future(target.error);
  Domain& domain = *target.domain;
  const CallSizes sizes = sizes_of(domain);
  const std::shared_ptr<Invocation> invocation = target.device->find(ticket.typed_data()[3]);
  if (!invocation) return failed_future("the ticket's call is not in flight; use each ticket once");
  int32_t num_tokens = 0;
  std::string error = count_tokens(sizes, x.dimensions(), sizes.shape.hidden, "x", &num_tokens);
  if (error.empty() && num_tokens != invocation->call.num_tokens) {
    error = "x has " + std::to_string(num_tokens) + " tokens per rank, topk_ids had " +
            std::to_string(invocation->call.num_tokens);
  }
  const PlanBuffers plan{route_slot,  broadcasts, quota,  num_broadcasts,
                         load_before, load,       status, generation};
  if (error.empty()) error = check_fused(sizes, num_tokens, x, topk_weights, *y, plan);
  const uint8_t* weights[kMaxPlanes] = {};
  if (error.empty()) error = planes_of(sizes, planes, invocation->call.layer, weights);
  // XLA frees an operand of start that this call does not take, while peers may still read it.
  if (error.empty() && !std::equal(weights, weights + kMaxPlanes, invocation->call.weights)) {
    error = "weights moved between start and fused_moe; pass the same arrays to both";
  }
  if (!error.empty()) {
    // The start cannot be undone, and the calls behind it would wait for its end.
    domain.fail({static_cast<int32_t>(ErrorCode::kBadFusedMoe), target.device->first_rank, -1,
                 invocation->call.layer, static_cast<int32_t>(Stage::kDispatch),
                 invocation->generation, 0, 0});
    return failed_future(error);
  }
  ffi::Promise promise;
  ffi::Future future(promise);
  FusedCall call{static_cast<const uint8_t*>(x.untyped_data()), topk_weights.typed_data(),
                 static_cast<uint8_t*>(y->untyped_data()), plan.outputs<PlanOutputs>(),
                 completion(promise)};
  target.device->fused_moe(invocation->generation, std::move(call));
  return future;
}

ffi::Future plan(ffi::RunId run, CallSite* site, U32 handle, I32 params, I32 topk_ids,
                 Out<I32> route_slot, Out<I32> broadcasts, Out<I32> quota, Out<I32> num_broadcasts,
                 Out<I32> load_before, Out<I32> load, Out<I32> status, Out<U32> generation,
                 int64_t config) {
  const Target target = find_target(handle.typed_data(), handle.element_count(), config);
  if (!target.error.empty()) return failed_future(target.error);
  Domain& domain = *target.domain;
  const CallSizes sizes = sizes_of(domain);
  StartCall call{};
  call.is_plan_only = true;
  const PlanBuffers buffers{route_slot,  broadcasts, quota,  num_broadcasts,
                            load_before, load,       status, generation};
  std::string error = read_call(sizes, params, topk_ids, &call);
  if (error.empty()) error = buffers.check(sizes, call.num_tokens);
  if (!error.empty()) return failed_future(error);
  ffi::Promise promise;
  ffi::Future future(promise);
  target.device->start({run.run_id, site->number}, call, buffers.outputs<PlanOutputs>(),
                       completion(promise));
  return future;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, instantiate, ffi::Ffi::BindInstantiate());

// Calls that begin an invocation say which, by the run and where in its program they stand.
auto bind_site() { return ffi::Ffi::Bind().Ctx<ffi::RunId>().Ctx<ffi::State<CallSite>>(); }

XLA_FFI_DEFINE_HANDLER(kStart, start, with_start(bind_site()).Attr<int64_t>("config"));
XLA_FFI_DEFINE_HANDLER(kFusedMoe, fused_moe,
                       with_fused_moe(ffi::Ffi::Bind()).Attr<int64_t>("config"));
XLA_FFI_DEFINE_HANDLER(kPlan, plan, with_plan(bind_site()).Attr<int64_t>("config"));

}  // namespace

void bind_calls(nb::module_& m) {
  m.def("call_site_type", [] {
    nb::dict type;
    type["type_id"] = nb::capsule(&CallSite::id);
    type["type_info"] = nb::capsule(&call_site_info);
    return type;
  });
  m.attr("HANDLE_MARK") = process_mark();
  m.def("cpu_calls", [] {
    nb::dict calls;
    const auto with_site = [](auto* execute) {
      nb::dict stages;
      stages["instantiate"] = capsule_of(kInstantiate);
      stages["execute"] = capsule_of(execute);
      return stages;
    };
    calls["start"] = with_site(kStart);
    calls["fused_moe"] = capsule_of(kFusedMoe);
    calls["plan"] = with_site(kPlan);
    return calls;
  });
}

}  // namespace iser
