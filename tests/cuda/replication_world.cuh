// The devices of a Domain as the replication kernel sees them, made by hand: heads, blocks, tables,
// weights, and the call tags and plan that the plan kernel would have left. Devices share the GPUs
// there are, so one GPU can hold many of them.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ffi/cuda/replication.cuh"
#include "tests/cuda/check.cuh"
#include "tests/shapes.h"

namespace iser::cuda {

inline int num_gpus() {
  int count = 0;
  CHECK_CUDA(cudaGetDeviceCount(&count));
  return count;
}

// Every GPU can read and write every other's memory, and has the kernels loaded.
inline void prepare_gpus(int count) {
  for (int a = 0; a < count; ++a) {
    CHECK_CUDA(cudaSetDevice(a));
    CHECK_CUDA(prepare_replication());
    for (int b = 0; b < count; ++b) {
      if (a != b) CHECK_CUDA(cudaDeviceEnablePeerAccess(b, 0));
    }
  }
}

class World {
 public:
  World(const DomainShape& shape, int num_devices, int num_gpus, uint64_t timeout_ns)
      : shape(shape),
        layout(block_layout(shape)),
        num_devices(num_devices),
        ranks_per_device(shape.slots.num_ranks / num_devices) {
    for (int d = 0; d < num_devices; ++d) devices_.push_back(make_device(d, d % num_gpus));
    for (int d = 0; d < num_devices; ++d) write_table(d, timeout_ns);
  }

  ~World() {
    for (const Device& device : devices_) {
      CHECK_CUDA(cudaSetDevice(device.gpu));
      for (void* memory : {device.segment, device.weights, device.state})
        CHECK_CUDA(cudaFree(memory));
      CHECK_CUDA(cudaStreamDestroy(device.stream));
    }
  }
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  const DomainShape shape;
  const BlockLayout layout;
  const int num_devices, ranks_per_device;

  int gpu(int device) const { return devices_[device].gpu; }
  cudaStream_t stream(int device) const { return devices_[device].stream; }
  DeviceHead* head(int device) const {
    return reinterpret_cast<DeviceHead*>(devices_[device].segment);
  }
  BlockView block(int rank) const {
    uint8_t* blocks = devices_[rank / ranks_per_device].segment + head_bytes(shape);
    return {blocks + rank % ranks_per_device * layout.total, &layout};
  }
  // A plane of a rank's first home expert.
  uint8_t* weights(int rank, int plane) const {
    const PlaneLayout& of = layout.bundle.planes[plane];
    const size_t home = shape.slots.num_home();
    return devices_[rank / ranks_per_device].weights +
           (of.offset * ranks_per_device + rank % ranks_per_device * of.bytes) * home;
  }
  const DeviceTable* table(int device) const {
    return reinterpret_cast<const DeviceTable*>(devices_[device].state + kTableAt);
  }
  const CallCell* cell(int device) const {
    return reinterpret_cast<const CallCell*>(devices_[device].state + kCellAt);
  }

  // What the plan kernel leaves behind: generation, call tags, rows and the plan's hash.
  void set_plan(uint32_t generation, int32_t layer, const std::vector<Broadcast>& rows,
                uint64_t hash) {
    std::vector<MailTag> tags(shape.slots.num_ranks);
    for (int r = 0; r < shape.slots.num_ranks; ++r) {
      tags[r].tag = {generation, layer, 0, 1, 0, 0, {}};
      for (int i = 0; i < layout.bundle.num_planes; ++i)
        tags[r].tag.weights[i] = reinterpret_cast<uint64_t>(weights(r, i));
      set(&block(r).words()->plan_hash, hash);
    }
    const int32_t count = static_cast<int32_t>(rows.size());
    for (int d = 0; d < num_devices; ++d) {
      set(mail_tags(shape, head(d), generation), tags.data(), tags.size());
      set(devices_[d].state + kGenerationAt, &generation, 1);
      set(devices_[d].state + kCountAt, &count, 1);
      set(devices_[d].state + rows_at(), rows.data(), rows.size());
    }
  }

  // Another cell lets calls in flight have a generation each.
  void replicate(int device, const ReplicationOptions& options,
                 const CallCell* other_cell = nullptr) const {
    const ReplicationLaunch launch{other_cell ? other_cell : cell(device), shape, options};
    CHECK_CUDA(cudaSetDevice(gpu(device)));
    CHECK_CUDA(launch_replication(launch, stream(device)));
  }

  void gate(int device, const CallCell* other_cell = nullptr) const {
    CHECK_CUDA(cudaSetDevice(gpu(device)));
    CHECK_CUDA(launch_ready_gate(other_cell ? other_cell : cell(device), stream(device)));
  }

  // The device's table with the plan's generation at another address.
  DeviceTable table_with(int device, uint32_t* generation_word) const {
    DeviceTable table = get(this->table(device));
    table.plan.generation = generation_word;
    return table;
  }

  void synchronize() const {
    for (int d = 0; d < num_devices; ++d) {
      CHECK_CUDA(cudaSetDevice(gpu(d)));
      CHECK_CUDA(cudaStreamSynchronize(stream(d)));
    }
  }

  template <typename T>
  static T get(const T* device_word) {
    T value;
    CHECK_CUDA(cudaMemcpy(&value, device_word, sizeof(T), cudaMemcpyDefault));
    return value;
  }
  template <typename T, typename U>
  static void set(U* target, const T* values, size_t count) {
    if (count) CHECK_CUDA(cudaMemcpy(target, values, count * sizeof(T), cudaMemcpyDefault));
  }
  template <typename T>
  static void set(T* device_word, T value) {
    set(device_word, &value, 1);
  }

 private:
  struct Device {
    int gpu;
    cudaStream_t stream;
    uint8_t *segment, *weights, *state;
  };
  // Offsets in a device's state: what its plan and its options keep between calls.
  static constexpr size_t kGenerationAt = 0, kCountAt = 4, kCallAt = 64, kCellAt = 128,
                          kTableAt = 256,
                          kStallsAt = kTableAt + (sizeof(DeviceTable) + 127) / 128 * 128;

  size_t times_at() const {
    const size_t stalls = sizeof(uint64_t) * static_cast<int>(Stage::kNumStages);
    return kStallsAt + align_up(stalls * ranks_per_device, 128);
  }
  size_t rows_at() const { return times_at() + align_up(sizeof(CallTimes) * kNumTimes, 128); }

  Device make_device(int, int gpu) const {
    Device device{gpu, nullptr, nullptr, nullptr, nullptr};
    const size_t segment = head_bytes(shape) + ranks_per_device * layout.total;
    const size_t home = shape.slots.num_home() * ranks_per_device * layout.bundle.bytes;
    const size_t rows = static_cast<size_t>(shape.slots.num_ranks) * shape.slots.num_helper_slots;
    const size_t state = rows_at() + rows * sizeof(Broadcast);
    int lowest = 0, highest = 0;
    CHECK_CUDA(cudaSetDevice(gpu));
    CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CHECK_CUDA(cudaStreamCreateWithPriority(&device.stream, cudaStreamNonBlocking, highest));
    CHECK_CUDA(cudaMalloc(&device.segment, segment));
    CHECK_CUDA(cudaMalloc(&device.weights, home));
    CHECK_CUDA(cudaMalloc(&device.state, state));
    CHECK_CUDA(cudaMemset(device.segment, 0, segment));
    CHECK_CUDA(cudaMemset(device.state, 0, state));
    CHECK_CUDA(cudaDeviceSynchronize());
    return device;
  }

  void write_table(int device, uint64_t timeout_ns) {
    DeviceTable table{};
    table.shape = shape;
    table.layout = layout;
    table.num_devices = num_devices;
    table.ranks_per_device = ranks_per_device;
    table.device = device;
    table.first_rank = device * ranks_per_device;
    table.timeout_ns = table.startup_timeout_ns = timeout_ns;
    uint8_t* state = devices_[device].state;
    table.call = reinterpret_cast<CallState*>(state + kCallAt);
    table.plan.broadcasts = reinterpret_cast<int32_t*>(state + rows_at());
    table.plan.num_broadcasts = reinterpret_cast<int32_t*>(state + kCountAt);
    table.plan.generation = reinterpret_cast<uint32_t*>(state + kGenerationAt);
    table.stalls = reinterpret_cast<uint64_t*>(state + kStallsAt);
    table.times = reinterpret_cast<CallTimes*>(state + times_at());
    for (int d = 0; d < num_devices; ++d) table.heads[d] = head(d);
    for (int r = 0; r < shape.slots.num_ranks; ++r) table.blocks[r] = block(r).base;
    set(state + kTableAt, &table, 1);
    const CallCell cell{this->table(device), {}};
    set(state + kCellAt, &cell, 1);
  }

  std::vector<Device> devices_;
};

}  // namespace iser::cuda
