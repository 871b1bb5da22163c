#include "ffi/cuda/device.cuh"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <map>
#include <memory>
#include <stdexcept>

#include "ffi/cuda/shared_expert.cuh"
#include "ffi/cuda/start.cuh"

namespace iser::cuda {
namespace {

constexpr int kMaxOrdinals = 64;

// Leaked on purpose: handlers may still come after static destructors have run.
struct Host {
  std::mutex mutex;
  DeviceRuntime* devices[kMaxOrdinals] = {};
  std::map<uint64_t, std::unique_ptr<DomainSetup>> setups;
};
Host& host() {
  static Host* const instance = new Host;
  return *instance;
}

// The device's own part behind its blocks.
struct PrivateLayout {
  size_t table, call, stalls, times, topk_ids, route_slot, broadcasts, quota, scalars, loads,
      slot_tables;
  size_t total;
};

PrivateLayout private_layout(const DomainSetup& setup) {
  const DomainShape& shape = setup.shape;
  const size_t ranks = shape.slots.num_ranks, local = setup.ranks_per_device;
  const size_t rows = setup.plan.max_broadcasts(), routes = local * shape.max_routes();
  PrivateLayout layout{};
  const auto take = [&](size_t bytes) {
    const size_t offset = layout.total;
    layout.total = align_up(layout.total + bytes, kBlockAlign);
    return offset;
  };
  layout.table = take(sizeof(DeviceTable));
  layout.call = take(sizeof(CallState));
  layout.stalls = take(sizeof(uint64_t) * local * static_cast<int>(Stage::kNumStages));
  layout.times = take(sizeof(CallTimes) * kNumTimes);
  layout.topk_ids = take(sizeof(int32_t) * routes);
  layout.route_slot = take(sizeof(int32_t) * routes);
  layout.broadcasts = take(sizeof(Broadcast) * rows);
  layout.quota = take(sizeof(int32_t) * rows * ranks);
  layout.scalars = take(sizeof(int32_t) * 3);
  layout.loads = take(sizeof(int32_t) * 2 * ranks);
  if (setup.is_resident) layout.slot_tables = take(slot_table_bytes(setup.plan) * shape.num_banks);
  return layout;
}

uint64_t private_address(const DomainSetup& setup, uint64_t segment) {
  return block_address(setup, segment, setup.ranks_per_device);
}

template <typename T>
T* at(uint64_t base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

PlanOutputs plan_outputs(const DomainSetup& setup, const PrivateLayout& layout, uint64_t base) {
  int32_t* scalars = at<int32_t>(base, layout.scalars);
  int32_t* loads = at<int32_t>(base, layout.loads);
  return {at<int32_t>(base, layout.route_slot),
          at<int32_t>(base, layout.broadcasts),
          at<int32_t>(base, layout.quota),
          scalars,
          loads,
          loads + setup.shape.slots.num_ranks,
          scalars + 1,
          reinterpret_cast<uint32_t*>(scalars + 2)};
}

DeviceTable make_table(const DomainSetup& setup, const DomainPart& part) {
  const PrivateLayout layout = private_layout(setup);
  const uint64_t base = private_address(setup, part.segments[part.device]);
  DeviceTable table{};
  table.shape = setup.shape;
  table.layout = block_layout(setup.shape);
  table.num_devices = static_cast<int32_t>(part.segments.size());
  table.ranks_per_device = setup.ranks_per_device;
  table.device = part.device;
  table.first_rank = part.device * setup.ranks_per_device;
  table.num_layers = setup.num_layers;
  table.sizes = part.sizes;
  table.timeout_ns = setup.timeout_ns;
  table.startup_timeout_ns = setup.startup_timeout_ns;
  table.call = at<CallState>(base, layout.call);
  table.topk_ids = at<int32_t>(base, layout.topk_ids);
  table.plan = plan_outputs(setup, layout, base);
  if (setup.is_resident) table.slot_tables = at<uint8_t>(base, layout.slot_tables);
  table.stalls = at<uint64_t>(base, layout.stalls);
  table.times = at<CallTimes>(base, layout.times);
  for (size_t d = 0; d < part.segments.size(); ++d) {
    table.heads[d] = at<DeviceHead>(part.segments[d], 0);
    for (int32_t v = 0; v < setup.ranks_per_device; ++v) {
      table.blocks[d * setup.ranks_per_device + v] =
          at<uint8_t>(block_address(setup, part.segments[d], v), 0);
    }
  }
  return table;
}

struct Here : OnDevice {
  explicit Here(int ordinal) : OnDevice(ordinal) { check_cuda(error(), "choosing the GPU"); }
};

std::unique_ptr<DeviceRuntime> make_runtime(int ordinal, uint32_t process_mark) {
  auto runtime = std::make_unique<DeviceRuntime>();
  runtime->in_flight.reserve(DeviceRuntime::kNumCells);
  runtime->ordinal = ordinal;
  int lowest = 0, highest = 0;
  check_cuda(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "reading stream priorities");
  for (cudaStream_t* stream : {&runtime->copy, &runtime->admin}) {
    check_cuda(cudaStreamCreateWithPriority(stream, cudaStreamNonBlocking, highest),
               "making a stream");
  }
  check_cuda(cudaMalloc(&runtime->directory, sizeof(Directory)), "allocating the directory");
  check_cuda(cudaMalloc(&runtime->cells, sizeof(CallCell) * DeviceRuntime::kNumCells),
             "allocating cells");
  Directory empty{};
  empty.mark = process_mark;
  write_memory(*runtime, reinterpret_cast<uint64_t>(runtime->directory), &empty, sizeof empty);
  const auto make_event = [](cudaEvent_t* event) {
    check_cuda(cudaEventCreateWithFlags(event, cudaEventDisableTiming), "making an event");
  };
  make_event(&runtime->started);
  make_event(&runtime->left);
  for (int i = 0; i < DeviceRuntime::kNumCells; ++i) {
    make_event(&runtime->planned[i]);
    make_event(&runtime->copied[i]);
  }
  return runtime;
}

void load_kernels() {
  check_cuda(prepare_start(), "loading start");
  check_cuda(prepare_replication(), "loading replication");
  check_cuda(prepare_fused(), "loading fused_moe");
}

}  // namespace

OnDevice::OnDevice(int ordinal) : wanted_(ordinal), before_(ordinal) {
  error_ = cudaGetDevice(&before_);
  if (error_ == cudaSuccess && before_ != wanted_) error_ = cudaSetDevice(wanted_);
}

OnDevice::~OnDevice() {
  if (before_ != wanted_) cudaSetDevice(before_);
}

std::string cuda_text(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return "";
  return std::string(what) + " failed: " + cudaGetErrorName(error) + ", " +
         cudaGetErrorString(error);
}

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess) throw std::runtime_error(cuda_text(error, what));
}

DeviceRuntime& open_device(int ordinal, uint32_t process_mark) {
  if (ordinal < 0 || ordinal >= kMaxOrdinals) {
    throw std::invalid_argument("GPU " + std::to_string(ordinal) + " is outside 0.." +
                                std::to_string(kMaxOrdinals - 1));
  }
  std::lock_guard lock(host().mutex);
  DeviceRuntime*& kept = host().devices[ordinal];
  if (!kept) {
    const Here here(ordinal);
    auto runtime = make_runtime(ordinal, process_mark);
    load_kernels();
    kept = runtime.release();
  }
  return *kept;
}

void open_cublas(DeviceRuntime& runtime, const std::string& path) {
  std::lock_guard lock(runtime.mutex);
  if (runtime.cublas) return;
  const Here here(runtime.ordinal);
  std::string error = load_cublas(path);
  if (error.empty()) error = make_cublas(&runtime.cublas);
  if (!error.empty()) throw std::runtime_error(error);
}

DeviceRuntime* find_device(int ordinal) {
  std::lock_guard lock(host().mutex);
  return ordinal >= 0 && ordinal < kMaxOrdinals ? host().devices[ordinal] : nullptr;
}

void check_sizes(const DomainSetup& setup) {
  for (const char* error :
       {replication_options_error(setup.shape, setup.replication),
        fused_error(setup.shape, setup.ranks_per_device, setup.dtype, setup.fused)}) {
    if (!error) continue;
    throw std::invalid_argument("hidden_size=" + std::to_string(setup.shape.hidden) +
                                ", intermediate_size=" + std::to_string(setup.shape.intermediate) +
                                " on GPUs: " + error);
  }
}

void add_setup(DeviceRuntime& runtime, uint64_t sizes, DomainSetup setup) {
  const Here here(runtime.ordinal);
  const cudaError_t code =
      prepare_plan(setup.plan, setup.ranks_per_device, setup.shape.max_routes(),
                   setup.plan_ctas_per_rank, &setup.grid);
  if (code == cudaErrorCooperativeLaunchTooLarge) {
    throw std::invalid_argument(std::to_string(setup.ranks_per_device) +
                                " ranks do not fit on this GPU at once; use fewer "
                                "ranks_per_device");
  }
  if (code == cudaErrorInvalidValue) {
    throw std::invalid_argument(
        "the plan kernel takes at most " + std::to_string(kMaxRanks) + " ranks, " +
        std::to_string(kMaxPlanExperts) + " experts, " + std::to_string(kMaxPlanHelperSlots) +
        " helper slots and 4 M routes a rank; lower num_helper_slots or max_tokens_per_rank");
  }
  check_cuda(code, "preparing the plan kernel");
  std::lock_guard lock(host().mutex);
  std::unique_ptr<DomainSetup>& kept = host().setups[sizes];
  // Programs that run keep pointing at the one that is there; another GPU chooses alike.
  if (!kept) kept = std::make_unique<DomainSetup>(setup);
  if (!(kept->grid == setup.grid)) {
    throw std::runtime_error("the GPUs of a Domain differ; a Domain takes GPUs of one kind");
  }
}

const DomainSetup* find_setup(uint64_t sizes) {
  std::lock_guard lock(host().mutex);
  const auto found = host().setups.find(sizes);
  return found == host().setups.end() ? nullptr : found->second.get();
}

uint64_t head_address(uint64_t segment) { return segment; }

uint64_t block_address(const DomainSetup& setup, uint64_t segment, int32_t local_idx) {
  return segment + head_bytes(setup.shape) + block_layout(setup.shape).total * local_idx;
}

uint64_t stall_address(const DomainSetup& setup, uint64_t segment, int32_t local_idx, Stage stage) {
  const int32_t index =
      local_idx * static_cast<int32_t>(Stage::kNumStages) + static_cast<int32_t>(stage);
  return private_address(setup, segment) + private_layout(setup).stalls + sizeof(uint64_t) * index;
}

uint64_t times_address(const DomainSetup& setup, uint64_t segment) {
  return private_address(setup, segment) + private_layout(setup).times;
}

size_t device_bytes(const DomainSetup& setup) {
  return private_address(setup, 0) + private_layout(setup).total;
}

size_t workspace_bytes(const DomainSetup& setup, int32_t num_tokens) {
  return fused_workspace_bytes(setup.shape, setup.ranks_per_device, num_tokens,
                               static_cast<int32_t>(setup.max_routes_per_rank), setup.dtype,
                               setup.fused);
}

namespace {

// With the runtime's mutex held, so that no handler is half way through enqueueing a call.
bool has_run_all(DeviceRuntime& runtime) {
  for (const cudaError_t state : {cudaEventQuery(runtime.left), cudaStreamQuery(runtime.copy)}) {
    if (state == cudaErrorNotReady) return false;
    check_cuda(state, "waiting for calls in flight");
  }
  return true;
}

}  // namespace

bool is_idle(DeviceRuntime& runtime) {
  std::lock_guard lock(runtime.mutex);
  return has_run_all(runtime);
}

void read_memory(DeviceRuntime& runtime, uint64_t address, void* to, size_t bytes) {
  check_cuda(cudaMemcpyAsync(to, reinterpret_cast<const void*>(address), bytes,
                             cudaMemcpyDeviceToHost, runtime.admin),
             "reading device memory");
  check_cuda(cudaStreamSynchronize(runtime.admin), "reading device memory");
}

void write_memory(DeviceRuntime& runtime, uint64_t address, const void* from, size_t bytes) {
  check_cuda(cudaMemcpyAsync(reinterpret_cast<void*>(address), from, bytes, cudaMemcpyHostToDevice,
                             runtime.admin),
             "writing device memory");
  check_cuda(cudaStreamSynchronize(runtime.admin), "writing device memory");
}

namespace {

// As if all generations before the first had run.
void write_generation(DeviceRuntime& runtime, const DomainSetup& setup, uint64_t segment) {
  const uint32_t before = setup.first_generation - 1;
  uint32_t arrived[static_cast<int32_t>(Stage::kNumStages)], arrivals[std::size(arrived)];
  std::fill(std::begin(arrived), std::end(arrived), before);
  std::fill(std::begin(arrivals), std::end(arrivals), before * setup.shape.slots.num_ranks);
  const uint64_t head = head_address(segment);
  write_memory(runtime, head + offsetof(DeviceHead, words.arrivals), arrivals, sizeof arrivals);
  write_memory(runtime, head + offsetof(DeviceHead, generation), &before, sizeof before);
  for (int32_t v = 0; v < setup.ranks_per_device; ++v) {
    write_memory(runtime, block_address(setup, segment, v) + offsetof(RankWords, arrived), arrived,
                 sizeof arrived);
  }
}

}  // namespace

void write_part(DeviceRuntime& runtime, const DomainSetup& setup, const DomainPart& part) {
  const Here here(runtime.ordinal);
  const uint64_t segment = part.segments[part.device];
  const PrivateLayout layout = private_layout(setup);
  const uint64_t base = private_address(setup, segment);
  const BlockLayout block = block_layout(setup.shape);
  const auto fill = [&](uint64_t address, int byte, size_t bytes) {
    check_cuda(cudaMemsetAsync(reinterpret_cast<void*>(address), byte, bytes, runtime.admin),
               "filling device memory");
  };
  for (int32_t v = 0; v < setup.ranks_per_device; ++v) {
    for (int section = 0; section < kNumSections; ++section) {
      fill(block_address(setup, segment, v) + block.guard(section), kGuardByte, kGuardBytes);
    }
  }
  if (setup.is_resident) {  // no expert, version -1
    fill(base + layout.slot_tables, 0xff, slot_table_bytes(setup.plan) * setup.shape.num_banks);
  }
  const DeviceTable table = make_table(setup, part);
  write_memory(runtime, base + layout.table, &table, sizeof table);
  if (setup.first_generation != 1) write_generation(runtime, setup, segment);
}

void publish_part(DeviceRuntime& runtime, const DomainSetup& setup, const DomainPart& part) {
  const Here here(runtime.ordinal);
  Directory::Entry* entry = &runtime.directory->entries[part.id % kMaxDomains];
  Directory::Entry now{};
  read_memory(runtime, reinterpret_cast<uint64_t>(entry), &now, sizeof now);
  if (now.id != 0) {
    throw std::runtime_error("Domain " + std::to_string(now.id) +
                             " is still open on this GPU; at most " + std::to_string(kMaxDomains) +
                             " can be open at once: close some");
  }
  const uint64_t base = private_address(setup, part.segments[part.device]);
  const Directory::Entry named{part.id, at<DeviceTable>(base, private_layout(setup).table)};
  write_memory(runtime, reinterpret_cast<uint64_t>(entry), &named, sizeof named);
}

bool remove_part(DeviceRuntime& runtime, uint32_t id) {
  const Here here(runtime.ordinal);
  std::lock_guard lock(runtime.mutex);
  if (!has_run_all(runtime)) return false;
  const uint64_t entry = reinterpret_cast<uint64_t>(&runtime.directory->entries[id % kMaxDomains]);
  Directory::Entry now{};
  read_memory(runtime, entry, &now, sizeof now);
  const Directory::Entry none{};
  if (now.id == id) write_memory(runtime, entry, &none, sizeof none);
  return true;
}

uint32_t take_misuse(DeviceRuntime& runtime) {
  const Here here(runtime.ordinal);
  const uint64_t word = reinterpret_cast<uint64_t>(&runtime.directory->num_misuse);
  uint32_t count = 0;
  read_memory(runtime, word, &count, sizeof count);
  const uint32_t none = 0;
  if (count > 0) write_memory(runtime, word, &none, sizeof none);
  return count;
}

}  // namespace iser::cuda
