// A Domain's part on a GPU as Python makes, inspects and closes it. Memory comes from Python:
// jax_iser/domain/cuda/memory.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <stdexcept>
#include <thread>
#include <vector>

#include "ffi/bindings/bindings.h"
#include "ffi/cpu/domain.h"
#include "ffi/cuda/device.cuh"
#include "ffi/cuda/shared_expert.cuh"

namespace nb = nanobind;

namespace iser {
namespace {

using cuda::CallTimes;
using cuda::DeviceRuntime;
using cuda::DomainPart;
using cuda::DomainSetup;

DomainSetup make_setup(const cpu::DomainOptions& options, int copy_sms) {
  DomainSetup setup{};
  setup.plan = options.plan_config();
  setup.shape = options.shape;
  setup.ranks_per_device = options.ranks_per_device;
  setup.num_layers = options.num_layers;
  setup.dtype = options.dtype == cpu::DType::kBF16 ? cuda::DType::kBF16 : cuda::DType::kF32;
  setup.is_resident = options.resident;
  setup.max_routes_per_rank = options.max_routes_per_rank;
  setup.timeout_ns = static_cast<uint64_t>(options.timeout_ns);
  setup.startup_timeout_ns = static_cast<uint64_t>(options.startup_timeout_ns);
  setup.poison = options.poison;
  setup.first_generation = options.first_generation;
  setup.plan_ctas_per_rank = 8;
  setup.replication.num_ctas = setup.fused.copy_sms = copy_sms;
  cuda::check_sizes(setup);
  return setup;
}

DeviceRuntime& opened(int ordinal) {
  DeviceRuntime* runtime = cuda::find_device(ordinal);
  if (!runtime) throw std::invalid_argument("open_device was not called for this GPU");
  return *runtime;
}

// The part of a Domain on one GPU of this process.
class CudaPart {
 public:
  CudaPart(int ordinal, const DomainSetup& setup, uint32_t id, uint64_t sizes, int device,
           std::vector<uint64_t> segments)
      : runtime_(opened(ordinal)), setup_(setup), part_{id, sizes, device, std::move(segments)} {
    if (device < 0 || static_cast<size_t>(device) >= part_.segments.size()) {
      throw std::invalid_argument("device " + std::to_string(device) + " of a Domain of " +
                                  std::to_string(part_.segments.size()));
    }
    cuda::write_part(runtime_, setup_, part_);
  }

  void publish() { cuda::publish_part(runtime_, setup_, part_); }
  bool remove() { return cuda::remove_part(runtime_, part_.id); }

  // Read again once it is there: whoever writes it sets `aborted` last.
  ErrorWord error() const {
    ProcessWords words{};
    const auto read = [&] {
      cuda::read_memory(runtime_, cuda::head_address(segment()), &words, sizeof words);
    };
    read();
    if (words.aborted == 0) return {};
    for (int i = 0; i < 1000 && words.aborted == 2; ++i) read();
    read();
    return words.error;
  }

  void fail(const ErrorWord& error) {
    if (this->error().code != 0) return;
    const uint64_t head = cuda::head_address(segment());
    const uint32_t one = 1;
    cuda::write_memory(runtime_, head + offsetof(ProcessWords, error), &error, sizeof error);
    cuda::write_memory(runtime_, head + offsetof(ProcessWords, aborted), &one, sizeof one);
  }

  // The first section whose guard words are overwritten, with its rank.
  ErrorWord check_guards() const {
    const BlockLayout layout = block_layout(setup_.shape);
    for (int32_t v = 0; v < setup_.ranks_per_device; ++v) {
      for (int section = 0; section < kNumSections; ++section) {
        uint8_t guard[kGuardBytes];
        cuda::read_memory(runtime_,
                          cuda::block_address(setup_, segment(), v) + layout.guard(section), guard,
                          kGuardBytes);
        for (uint8_t byte : guard) {
          if (byte == kGuardByte) continue;
          return {static_cast<int32_t>(ErrorCode::kCorrupt),
                  part_.device * setup_.ranks_per_device + v,
                  -1,
                  -1,
                  0,
                  0,
                  static_cast<uint64_t>(section),
                  0};
        }
      }
    }
    return {};
  }

  void stall(int local_idx, int stage, double seconds) {
    if (local_idx < 0 || local_idx >= setup_.ranks_per_device || stage < 0 ||
        stage >= static_cast<int>(Stage::kNumStages)) {
      throw nb::value_error("no such rank or stage on this GPU");
    }
    const uint64_t ns = static_cast<uint64_t>(seconds * 1e9);
    cuda::write_memory(runtime_,
                       cuda::stall_address(setup_, segment(), local_idx, static_cast<Stage>(stage)),
                       &ns, sizeof ns);
  }

  nb::bytes read_helper(int local_idx, int bank, int helper_idx) const {
    const DomainShape& shape = setup_.shape;
    if (local_idx < 0 || local_idx >= setup_.ranks_per_device || bank < 0 ||
        bank >= shape.num_banks || helper_idx < 0 || helper_idx >= shape.slots.num_helper_slots) {
      throw nb::value_error("no such rank, bank or helper slot on this GPU");
    }
    const BlockLayout layout = block_layout(shape);
    const BlockView origin{nullptr, &layout};
    const uint64_t offset = reinterpret_cast<uint64_t>(origin.helper(shape, bank, helper_idx));
    std::vector<char> bytes(shape.bundle_bytes());
    cuda::read_memory(runtime_, cuda::block_address(setup_, segment(), local_idx) + offset,
                      bytes.data(), bytes.size());
    return nb::bytes(bytes.data(), bytes.size());
  }

  // Rows of `Timeline`, oldest first: calls that have ended.
  nb::list read_timelines() const {
    std::vector<CallTimes> times(cuda::kNumTimes);
    cuda::read_memory(runtime_, cuda::times_address(setup_, segment()), times.data(),
                      times.size() * sizeof(CallTimes));
    uint32_t newest = 0;
    cuda::read_memory(runtime_,
                      cuda::head_address(segment()) + offsetof(cuda::DeviceHead, generation),
                      &newest, sizeof newest);
    // By age: calls of any two generations may be there, since plans leave no times.
    std::sort(times.begin(), times.end(), [newest](const CallTimes& a, const CallTimes& b) {
      return newest - a.generation > newest - b.generation;
    });
    nb::list rows;
    for (const CallTimes& t : times) {
      if (t.finished == 0) continue;
      rows.append(nb::make_tuple(part_.device * setup_.ranks_per_device, t.generation, t.layer,
                                 t.started, t.planned, t.copy_begin, t.copy_end, t.fused_called,
                                 t.ready_seen, t.finished));
    }
    return rows;
  }

  // Whether MAIN and COPY run dry within so many seconds.
  bool wait_idle(double seconds) const {
    nb::gil_scoped_release release;
    const auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!cuda::is_idle(runtime_)) {
      if (std::chrono::steady_clock::now() >= limit) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    return true;
  }

 private:
  uint64_t segment() const { return part_.segments[part_.device]; }

  DeviceRuntime& runtime_;
  const DomainSetup setup_;
  const DomainPart part_;
};

}  // namespace

void bind_cuda_domain(nb::module_& m) {
  nb::class_<DomainSetup>(m, "DomainSetup")
      .def(
          "__init__",
          [](DomainSetup* self, const cpu::DomainOptions& options, int copy_sms) {
            new (self) DomainSetup(make_setup(options, copy_sms));
          },
          nb::arg("options"), nb::arg("copy_sms"))
      .def("device_bytes", &cuda::device_bytes)
      .def("workspace_bytes", &cuda::workspace_bytes);
  nb::class_<CudaPart>(m, "CudaPart")
      .def(nb::init<int, const DomainSetup&, uint32_t, uint64_t, int, std::vector<uint64_t>>(),
           nb::arg("ordinal"), nb::arg("setup"), nb::arg("id"), nb::arg("sizes"), nb::arg("device"),
           nb::arg("segments"))
      .def("publish", &CudaPart::publish)
      .def("remove", &CudaPart::remove)
      .def("wait_idle", &CudaPart::wait_idle)
      .def("describe_error",
           [](const CudaPart& part, bool has_startup_limit) {
             const ErrorWord error = part.error();
             return describe_error(error.code ? error : part.check_guards(), has_startup_limit);
           })
      .def("fail_closed",
           [](CudaPart& part, int rank) {
             part.fail({static_cast<int32_t>(ErrorCode::kClosed), rank, -1, -1, 0, 0, 0, 0});
           })
      .def("read_timelines", &CudaPart::read_timelines)
      .def("stall", &CudaPart::stall)
      .def("read_helper", &CudaPart::read_helper);
  m.def("open_device", [](int ordinal, uint32_t mark) { cuda::open_device(ordinal, mark); });
  m.def("add_setup", [](int ordinal, uint64_t sizes, const DomainSetup& setup) {
    cuda::add_setup(opened(ordinal), sizes, setup);
  });
  m.def("open_cublas",
        [](int ordinal, const std::string& path) { cuda::open_cublas(opened(ordinal), path); });
  m.def("shared_expert_bytes", [](int64_t tokens, int64_t inner, bool is_bf16) {
    return cuda::shared_expert_bytes(tokens, inner,
                                     is_bf16 ? cuda::DType::kBF16 : cuda::DType::kF32);
  });
  m.def("take_misuse", [](int ordinal) { return cuda::take_misuse(opened(ordinal)); });
  m.attr("MAX_DOMAINS") = cuda::kMaxDomains;
}

}  // namespace iser
