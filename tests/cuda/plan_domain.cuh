// A Domain for plain CUDA programs: heads, blocks and tables of several devices, which may be
// GPUs with peer access or shares of one GPU, and the plan that the C++ core derives for it.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "ffi/cuda/plan.cuh"
#include "tests/cuda/check.cuh"
#include "tests/cuda/plan_cases.h"
#include "tests/shapes.h"

namespace iser::cuda {

template <typename T>
struct DeviceArray {
  T* data = nullptr;
  size_t count = 0;

  explicit DeviceArray(size_t n = 0) : count(n) {
    CHECK_CUDA(cudaMalloc(&data, (n + 1) * sizeof(T)));
  }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;
  ~DeviceArray() { cudaFree(data); }
  void fill(int byte) { CHECK_CUDA(cudaMemset(data, byte, (count + 1) * sizeof(T))); }
  void put(const std::vector<T>& from) {
    if (from.empty()) return;
    CHECK_CUDA(cudaMemcpy(data, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  std::vector<T> get() const {
    std::vector<T> to(count);
    CHECK_CUDA(cudaMemcpy(to.data(), data, count * sizeof(T), cudaMemcpyDeviceToHost));
    return to;
  }
};

struct TestSizes {
  PlanConfig config;
  int32_t top_k;
  int32_t max_tokens;
  int32_t num_devices = 1;
  int32_t num_banks = 2;
  bool resident = false;
  uint64_t timeout_ns = 5'000'000'000ull;
  int32_t max_ctas_per_rank = 8;
};

// One device of the Domain: everything its plan call needs.
struct TestDevice {
  int gpu;
  cudaStream_t stream;
  DeviceArray<uint8_t> head, blocks, table, slot_tables;
  DeviceArray<int32_t> topk_ids, route_slot, broadcasts, quota, load_before, load, scalars;
  DeviceArray<int64_t> stamps;
  DeviceArray<uint64_t> stalls;
  DeviceArray<CallTimes> times;
  DeviceArray<CallState> state;
  DeviceArray<CallCell> cell;
  PlanGrid grid;

  TestDevice(int gpu_, const TestSizes& sizes, const DomainShape& shape, int32_t num_local)
      : gpu(gpu_),
        head(head_bytes(shape)),
        blocks(block_layout(shape).total * num_local),
        table(sizeof(DeviceTable)),
        slot_tables(slot_table_bytes(sizes.config) * sizes.num_banks),
        topk_ids(num_local * shape.max_routes()),
        route_slot(num_local * shape.max_routes()),
        broadcasts(sizes.config.max_broadcasts() * 6),
        quota(static_cast<size_t>(sizes.config.max_broadcasts()) * shape.slots.num_ranks),
        load_before(shape.slots.num_ranks),
        load(shape.slots.num_ranks),
        scalars(3),
        stamps(static_cast<size_t>(num_local) * 16 * static_cast<int>(PlanStamp::kNumStamps)),
        stalls(static_cast<size_t>(num_local) * static_cast<int>(Stage::kNumStages)),
        times(kNumTimes),
        state(1),
        cell(1) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    head.fill(0);
    blocks.fill(0);
    slot_tables.fill(0xff);  // no expert; version -1
    stamps.fill(0);
    stalls.fill(0);
    state.fill(0);
    CHECK_CUDA(
        prepare_plan(sizes.config, num_local, shape.max_routes(), sizes.max_ctas_per_rank, &grid));
    poison();
  }
  ~TestDevice() {
    cudaSetDevice(gpu);
    cudaStreamDestroy(stream);
  }
  PlanOutputs outputs() const {
    return {route_slot.data,  broadcasts.data,
            quota.data,       scalars.data,
            load_before.data, load.data,
            scalars.data + 1, reinterpret_cast<uint32_t*>(scalars.data + 2)};
  }
  void set_params(const CallParams& params) {
    cell.put({{reinterpret_cast<const DeviceTable*>(table.data), params}});
  }
  void poison() {
    for (DeviceArray<int32_t>* array :
         {&route_slot, &broadcasts, &quota, &load_before, &load, &scalars}) {
      array->fill(0x7b);
    }
  }
};

struct TestDomain {
  TestSizes sizes;
  DomainShape shape;
  BlockLayout layout;
  int32_t num_local;
  std::vector<std::unique_ptr<TestDevice>> devices;

  // As if all generations before this one had run.
  void begin_at(uint32_t generation) {
    const uint32_t before = generation - 1;
    for (const auto& device : devices) {
      CHECK_CUDA(cudaSetDevice(device->gpu));
      DeviceHead head{};
      for (uint32_t& word : head.words.arrivals) word = before * shape.slots.num_ranks;
      head.generation = before;
      CHECK_CUDA(cudaMemcpy(device->head.data, &head, sizeof head, cudaMemcpyHostToDevice));
      RankWords words{};
      for (uint32_t& word : words.arrived) word = before;
      for (int32_t v = 0; v < num_local; ++v) {
        CHECK_CUDA(cudaMemcpy(device->blocks.data + v * layout.total, &words, sizeof words,
                              cudaMemcpyHostToDevice));
      }
    }
  }

  // Device d lives on GPU gpus[d].
  TestDomain(const TestSizes& s, const std::vector<int>& gpus) : sizes(s) {
    shape = make_shape(s.config.slots, s.top_k, 16, 16, s.max_tokens, 4, s.num_banks);
    layout = block_layout(shape);
    num_local = s.config.slots.num_ranks / s.num_devices;
    for (int gpu : gpus) {
      CHECK_CUDA(cudaSetDevice(gpu));
      devices.push_back(std::make_unique<TestDevice>(gpu, s, shape, num_local));
    }
    for (size_t d = 0; d < devices.size(); ++d) {
      DeviceTable table{};
      table.shape = shape;
      table.layout = layout;
      table.num_devices = s.num_devices;
      table.ranks_per_device = num_local;
      table.device = d;
      table.first_rank = d * num_local;
      table.num_layers = 8;
      table.timeout_ns = table.startup_timeout_ns = s.timeout_ns;
      table.call = devices[d]->state.data;
      table.topk_ids = devices[d]->topk_ids.data;
      table.plan = devices[d]->outputs();
      table.slot_tables = s.resident ? devices[d]->slot_tables.data : nullptr;
      table.stalls = devices[d]->stalls.data;
      table.times = devices[d]->times.data;
      for (size_t other = 0; other < devices.size(); ++other) {
        table.heads[other] = reinterpret_cast<DeviceHead*>(devices[other]->head.data);
        for (int32_t v = 0; v < num_local; ++v) {
          table.blocks[other * num_local + v] = devices[other]->blocks.data + v * layout.total;
        }
      }
      CHECK_CUDA(cudaSetDevice(devices[d]->gpu));
      CHECK_CUDA(cudaMemcpy(devices[d]->table.data, &table, sizeof table, cudaMemcpyHostToDevice));
      devices[d]->set_params({0, 0, 1});
      for (int32_t v = 0; v < num_local; ++v) {
        for (int section = 0; section < kNumSections; ++section) {
          CHECK_CUDA(cudaMemset(devices[d]->blocks.data + v * layout.total + layout.guard(section),
                                kGuardByte, kGuardBytes));
        }
      }
    }
  }

  // Of what the device's cell says, into the Domain's own plan.
  PlanLaunch launch(int32_t d, int32_t num_tokens) const {
    PlanLaunch call{};
    call.cell = devices[d]->cell.data;
    call.config = sizes.config;
    call.num_tokens = num_tokens;
    call.top_k = sizes.top_k;
    call.is_plan_only = 1;
    return call;
  }

  void run(int32_t d, const PlanLaunch& call) const {
    CHECK_CUDA(cudaSetDevice(devices[d]->gpu));
    CHECK_CUDA(launch_plan(devices[d]->grid, call, devices[d]->stream));
  }
  void sync() const {
    for (const auto& device : devices) {
      CHECK_CUDA(cudaSetDevice(device->gpu));
      CHECK_CUDA(cudaStreamSynchronize(device->stream));
    }
  }
  std::vector<uint8_t> block(int32_t rank) const {
    std::vector<uint8_t> bytes(layout.total);
    CHECK_CUDA(cudaMemcpy(bytes.data(),
                          devices[rank / num_local]->blocks.data + rank % num_local * layout.total,
                          layout.total, cudaMemcpyDeviceToHost));
    return bytes;
  }
  ProcessWords words(int32_t d) const {
    ProcessWords words;
    CHECK_CUDA(cudaMemcpy(&words, devices[d]->head.data, sizeof words, cudaMemcpyDeviceToHost));
    return words;
  }
};

}  // namespace iser::cuda
