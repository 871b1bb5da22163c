// Domains as Python makes, inspects and closes them.
#include "ffi/cpu/domain.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <tuple>

#include "ffi/bindings/bindings.h"
#include "ffi/bindings/registry.h"
#include "ffi/cpu/pool.h"

namespace nb = nanobind;

namespace iser {
namespace {

// Leaked on purpose: threads of XLA may still ask after static destructors have run.
struct Registry {
  std::mutex mutex;
  uint32_t next_id = 1;
  std::map<uint32_t, std::shared_ptr<cpu::Domain>> domains;
};
Registry& registry() {
  static Registry* const instance = new Registry;
  return *instance;
}

uint8_t* map_shared(int fd, size_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) {
    throw std::runtime_error("mapping " + std::to_string(bytes) +
                             " bytes of symmetric memory failed: " + std::strerror(errno));
  }
  return static_cast<uint8_t*>(base);
}

struct Mapping {
  Mapping(int fd, size_t size) : base(map_shared(fd, size)), bytes(size) {}
  Mapping(Mapping&& other) noexcept : base(other.base), bytes(other.bytes) { other.base = nullptr; }
  ~Mapping() {
    if (base) munmap(base, bytes);
  }
  uint8_t* base;
  size_t bytes;
};

// (fd, first rank, ranks, socket to the process or -1)
using SegmentSpec = std::tuple<int, int, int, int>;

uint32_t create_domain(const cpu::DomainOptions& options, const std::vector<SegmentSpec>& specs,
                       int local_segment) {
  cpu::gemm_isa();      // raises on a bad ISER_CPU_ISA here rather than on a thread of the pool
  cpu::Pool::shared();  // and on a bad ISER_NUM_THREADS
  std::vector<cpu::Segment> segments;
  auto mappings = std::make_shared<std::vector<Mapping>>();
  for (const auto& [fd, first_rank, num_ranks, alive_fd] : specs) {
    mappings->emplace_back(fd, segment_bytes(options.shape, num_ranks));
    segments.push_back({mappings->back().base, first_rank, num_ranks, alive_fd});
  }
  std::shared_ptr<cpu::Domain> domain(
      new cpu::Domain(options, std::move(segments), local_segment),
      [mappings](cpu::Domain* d) { delete d; });  // the mappings go after it
  std::lock_guard lock(registry().mutex);
  const uint32_t id = registry().next_id++;
  registry().domains[id] = std::move(domain);
  return id;
}

std::shared_ptr<cpu::Domain> get(uint32_t id) {
  auto domain = find_domain(id);
  if (!domain) throw nb::value_error("this Domain is closed");
  if (const std::string error = forked_text(*domain); !error.empty()) {
    throw std::runtime_error(error);
  }
  return domain;
}

bool wait_idle(uint32_t id, double wait_s) {
  const auto domain = get(id);
  nb::gil_scoped_release release;
  return domain->wait_idle(static_cast<int64_t>(wait_s * 1e9));
}

// Waits for calls in flight, fails those that do not end, and forgets the Domain.
bool close_domain(uint32_t id, double wait_s) {
  std::shared_ptr<cpu::Domain> domain = get(id);
  nb::gil_scoped_release release;
  const bool is_idle = domain->wait_idle(static_cast<int64_t>(wait_s * 1e9));
  if (!is_idle && !domain->has_failed()) domain->fail_closed();
  {
    std::lock_guard lock(registry().mutex);
    if (registry().domains.erase(id) == 0) return is_idle;  // another closer ends it
  }
  // Calls hold the Domain only while they enqueue. It must end here: on a thread of a device it
  // would wait for itself.
  while (domain.use_count() > 1) std::this_thread::yield();
  domain.reset();
  return is_idle;
}

nb::dict describe_domain_error(uint32_t id) {
  const auto domain = get(id);
  domain->check_guards();
  const cpu::DomainOptions& options = domain->options;
  return describe_error(domain->error(), options.startup_timeout_ns != options.timeout_ns);
}

nb::tuple read_busy(uint32_t id, bool reset) {
  const auto domain = get(id);
  const auto read = [&](std::vector<std::atomic<int64_t>>& counters) {
    std::vector<int64_t> values;
    for (auto& counter : counters) values.push_back(reset ? counter.exchange(0) : counter.load());
    return values;
  };
  return nb::make_tuple(read(domain->busy_ns), read(domain->tile_rows));
}

nb::list read_timelines(uint32_t id) {
  nb::list rows;
  for (const auto& [rank, t] : get(id)->timelines()) {
    rows.append(nb::make_tuple(rank, t.generation, t.layer, t.started, t.planned, t.copy_begin,
                               t.copy_end, t.fused_called, t.ready_seen, t.finished));
  }
  return rows;
}

// A copy of one helper slot's bytes: what a replica looks like after a call.
nb::bytes read_helper(uint32_t id, int rank, int bank, int helper_idx) {
  const auto domain = get(id);
  const DomainShape& shape = domain->shape();
  if (rank < 0 || rank >= shape.slots.num_ranks || bank < 0 || bank >= shape.num_banks ||
      helper_idx < 0 || helper_idx >= shape.slots.num_helper_slots) {
    throw nb::value_error("no such helper slot");
  }
  return nb::bytes(domain->block(rank).helper(shape, bank, helper_idx), shape.bundle_bytes());
}

// By their names in jax_iser/limits.py.
nb::dict limits() {
  nb::dict result;
  result["MAX_RANKS"] = kMaxRanks;
  result["MAX_EXPERTS"] = kMaxExperts;
  result["MAX_HELPER_SLOTS"] = kMaxHelperSlots;
  result["MAX_LAYERS"] = kMaxLayers;
  result["MAX_LOCAL_SLOTS"] = kMaxLocalSlots;
  result["MAX_PLANES"] = kMaxPlanes;
  return result;
}

nb::dict section_sizes(const DomainShape& shape) {
  const BlockLayout layout = block_layout(shape);
  nb::dict result;
  for (int i = 0; i < kNumSections; ++i) {
    result[section_name(static_cast<Section>(i))] = layout.bytes[i];
  }
  result["total"] = layout.total;
  return result;
}

// Maps memory that `place` filled in the process of `first_rank`; `owner_base` 0 means this one.
uint64_t add_placed(uint32_t id, int fd, int first_rank, uint64_t owner_base, uint64_t bytes) {
  const uint8_t* base = map_shared(fd, bytes);
  const uint64_t address = reinterpret_cast<uint64_t>(base);
  get(id)->add_placed({first_rank, owner_base ? owner_base : address, bytes, base});
  return address;
}

// Writable bytes at `address`, unmapped when the last array over them goes.
nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>> placed_bytes(int fd, uint64_t bytes) {
  uint8_t* base = map_shared(fd, bytes);
  auto* size = new std::pair<uint8_t*, size_t>(base, bytes);
  nb::capsule owner(size, [](void* p) noexcept {
    auto* mapped = static_cast<std::pair<uint8_t*, size_t>*>(p);
    munmap(mapped->first, mapped->second);
    delete mapped;
  });
  return {base, {bytes}, owner};
}

void stall(uint32_t id, int rank, int stage, double seconds) {
  const auto domain = get(id);
  if (!domain->is_local(rank) || stage < 0 || stage >= static_cast<int>(Stage::kNumStages)) {
    throw nb::value_error("no such rank or stage in this process");
  }
  domain->stall(rank, static_cast<Stage>(stage), static_cast<int64_t>(seconds * 1e9));
}

}  // namespace

std::shared_ptr<cpu::Domain> find_domain(uint32_t id) {
  std::lock_guard lock(registry().mutex);
  const auto found = registry().domains.find(id);
  return found == registry().domains.end() ? nullptr : found->second;
}

std::string forked_text(const cpu::Domain& domain) {
  if (domain.owner_process == getpid()) return "";
  return "this process was forked from process " + std::to_string(domain.owner_process) +
         ", whose Domain this is; the threads that serve it do not exist here: start processes by "
         "multiprocessing's spawn or forkserver, or fork before the first use of JAX";
}

void bind_domain(nb::module_& m) {
  nb::class_<Activation>(m, "Activation")
      .def(
          "__init__",
          [](Activation* self, int kind, float limit, float alpha, float offset) {
            new (self) Activation{static_cast<ActivationKind>(kind), limit, alpha, offset};
          },
          nb::arg("kind"), nb::arg("limit"), nb::arg("alpha"), nb::arg("offset"));
  nb::class_<DomainShape>(m, "DomainShape")
      .def(
          "__init__",
          [](DomainShape* self, int num_ranks, int num_experts, int num_helper_slots, int top_k,
             int hidden, int intermediate, int max_tokens, int element_bytes, int num_banks,
             int num_staged, int weight_format, int token_format, bool has_biases,
             const Activation& activation) {
            new (self) DomainShape{{num_ranks, num_experts, num_helper_slots},
                                   top_k,
                                   hidden,
                                   intermediate,
                                   max_tokens,
                                   element_bytes,
                                   num_banks,
                                   num_staged,
                                   static_cast<WeightFormat>(weight_format),
                                   static_cast<TokenFormat>(token_format),
                                   has_biases,
                                   activation};
          },
          nb::kw_only(), nb::arg("num_ranks"), nb::arg("num_experts"), nb::arg("num_helper_slots"),
          nb::arg("top_k"), nb::arg("hidden"), nb::arg("intermediate"), nb::arg("max_tokens"),
          nb::arg("element_bytes"), nb::arg("num_banks"), nb::arg("num_staged"),
          nb::arg("weight_format"), nb::arg("token_format"), nb::arg("has_biases"),
          nb::arg("activation"))
      .def("planes",
           [](const DomainShape& shape) {
             nb::list planes;
             const BundleLayout bundle = shape.bundle();
             for (int32_t i = 0; i < bundle.num_planes; ++i) {
               const PlaneLayout& plane = bundle.planes[i];
               planes.append(nb::make_tuple(plane.rows, plane.columns, plane.element_bits,
                                            plane.scale_block, plane.offset, plane.bytes,
                                            plane.scales_offset, static_cast<int32_t>(plane.type),
                                            plane.num_dims));
             }
             return planes;
           })
      .def("bundle_bytes", &DomainShape::bundle_bytes)
      .def("token_bytes", &DomainShape::token_bytes)
      .def("section_sizes", &section_sizes)
      .def("segment_bytes",
           [](const DomainShape& shape, int ranks) { return segment_bytes(shape, ranks); });
  nb::class_<cpu::DomainOptions>(m, "DomainOptions")
      .def(
          "__init__",
          [](cpu::DomainOptions* self, const DomainShape& shape, bool is_bf16, int min_group_size,
             int min_routes, int gain_threshold, int copy_rule, bool resident, int num_layers,
             int ranks_per_device, int64_t max_routes_per_rank, double timeout_s,
             double startup_timeout_s, bool poison, int64_t sizes) {
            new (self) cpu::DomainOptions{shape,
                                          is_bf16 ? cpu::DType::kBF16 : cpu::DType::kF32,
                                          min_group_size,
                                          min_routes,
                                          gain_threshold,
                                          static_cast<CopyRule>(copy_rule),
                                          resident,
                                          num_layers,
                                          ranks_per_device,
                                          max_routes_per_rank,
                                          static_cast<int64_t>(timeout_s * 1e9),
                                          static_cast<int64_t>(startup_timeout_s * 1e9),
                                          poison,
                                          static_cast<uint64_t>(sizes)};
          },
          nb::kw_only(), nb::arg("shape"), nb::arg("is_bf16"), nb::arg("min_group_size"),
          nb::arg("min_routes"), nb::arg("gain_threshold"), nb::arg("copy_rule"),
          nb::arg("resident"), nb::arg("num_layers"), nb::arg("ranks_per_device"),
          nb::arg("max_routes_per_rank"), nb::arg("timeout_s"), nb::arg("startup_timeout_s"),
          nb::arg("poison"), nb::arg("sizes"))
      .def_rw("first_generation", &cpu::DomainOptions::first_generation);
  m.attr("LIMITS") = limits();
  m.def("create_domain", &create_domain);
  m.def("wait_idle", &wait_idle);
  m.def("leave_domain", [](uint32_t id) { get(id)->leave(); });
  m.def("close_domain", &close_domain);
  m.def("describe_error", &describe_domain_error);
  m.def("read_busy", &read_busy);
  m.def("read_timelines", &read_timelines);
  m.def("read_helper", &read_helper);
  m.def("add_placed", &add_placed);
  m.def("placed_bytes", &placed_bytes);
  m.def("stall", &stall);
  m.def("cpu_isa", &cpu::gemm_isa);
}

}  // namespace iser
