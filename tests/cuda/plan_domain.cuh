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

#define CHECK_CUDA(call)                                                                  \
  do {                                                                                    \
    const cudaError_t error_ = (call);                                                    \
    if (error_ != cudaSuccess) {                                                          \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call,                  \
                   cudaGetErrorString(error_));                                           \
      std::exit(2);                                                                       \
    }                                                                                     \
  } while (0)

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
        stamps(static_cast<size_t>(num_local) * 16 * static_cast<int>(PlanStamp::kNumStamps)) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    head.fill(0);
    blocks.fill(0);
    slot_tables.fill(0xff);  // no expert; version -1
    stamps.fill(0);
    CHECK_CUDA(prepare_plan(sizes.config, num_local, shape.max_routes(), sizes.max_ctas_per_rank,
                            &grid));
    poison();
  }
  ~TestDevice() {
    cudaSetDevice(gpu);
    cudaStreamDestroy(stream);
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

  // Device d lives on GPU gpus[d].
  TestDomain(const TestSizes& s, const std::vector<int>& gpus) : sizes(s) {
    shape = {s.config.slots, s.top_k, 16, 16, s.max_tokens, 4, s.num_banks, 0};
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
      table.timeout_ns = table.startup_timeout_ns = s.timeout_ns;
      for (size_t other = 0; other < devices.size(); ++other) {
        table.heads[other] = reinterpret_cast<DeviceHead*>(devices[other]->head.data);
        for (int32_t v = 0; v < num_local; ++v) {
          table.blocks[other * num_local + v] = devices[other]->blocks.data + v * layout.total;
        }
      }
      CHECK_CUDA(cudaSetDevice(devices[d]->gpu));
      CHECK_CUDA(cudaMemcpy(devices[d]->table.data, &table, sizeof table, cudaMemcpyHostToDevice));
      for (int32_t v = 0; v < num_local; ++v) {
        for (int section = 0; section < kNumSections; ++section) {
          CHECK_CUDA(cudaMemset(devices[d]->blocks.data + v * layout.total + layout.guard(section),
                                kGuardByte, kGuardBytes));
        }
      }
    }
  }

  PlanLaunch launch(int32_t d, int32_t num_tokens) const {
    TestDevice& device = *devices[d];
    PlanLaunch call{};
    call.table = reinterpret_cast<const DeviceTable*>(device.table.data);
    call.config = sizes.config;
    call.num_tokens = num_tokens;
    call.top_k = sizes.top_k;
    call.topk_ids = device.topk_ids.data;
    call.is_balanced = 1;
    call.is_plan_only = 1;
    call.slot_tables = sizes.resident ? device.slot_tables.data : nullptr;
    call.outputs = {device.route_slot.data,  device.broadcasts.data,
                    device.quota.data,       device.scalars.data,
                    device.load_before.data, device.load.data,
                    device.scalars.data + 1, reinterpret_cast<uint32_t*>(device.scalars.data + 2)};
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

// The C++ core's plan of some counts.
struct CorePlan {
  std::vector<Broadcast> broadcasts;
  std::vector<int32_t> quota, load_before, load;
  int32_t num_broadcasts = 0, target = 0;
  uint64_t hash = 0;

  CorePlan(const PlanConfig& config, const std::vector<int32_t>& counts, const int32_t* resident)
      : broadcasts(config.max_broadcasts()),
        quota(static_cast<size_t>(config.max_broadcasts()) * config.slots.num_ranks),
        load_before(config.slots.num_ranks),
        load(config.slots.num_ranks) {
    std::vector<int64_t> scratch(plan_scratch_bytes(config) / sizeof(int64_t) + 1);
    const PlanView view{broadcasts.data(), quota.data(),    load_before.data(),
                        load.data(),       &num_broadcasts, &target};
    plan_counts(config, counts.data(), resident, plan_scratch(config, scratch.data()), view);
    hash = plan_hash(config, view);
  }
};

// A source's routes rewritten from haloq::source_share, one route after the other.
struct CoreRoutes {
  std::vector<int32_t> route_slot, starts, send;

  CoreRoutes(const PlanConfig& config, const CorePlan& plan, const std::vector<int32_t>& counts,
             const int32_t* ids, size_t num_routes, int32_t source)
      : route_slot(num_routes, -1), starts(config.slots.num_slots() + 1, 0) {
    const SlotSpace& slots = config.slots;
    std::vector<std::vector<int32_t>> where(slots.num_experts);  // by expert: slot of each place
    for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
      const Broadcast& row = plan.broadcasts[b];
      std::vector<int32_t> share(slots.num_ranks);
      source_share(config, counts.data(), row.expert,
                   plan.quota.data() + static_cast<size_t>(b) * slots.num_ranks, source,
                   share.data());
      const auto give = [&](int32_t host) {
        const int32_t slot = host == row.owner ? slots.home_slot(row.expert)
                                               : slots.helper_slot(host, row.helper_idx);
        where[row.expert].insert(where[row.expert].end(), share[host], slot);
      };
      give(source);
      for (int32_t h = 0; h < slots.num_ranks; ++h) {
        if (h != source) give(h);
      }
    }
    std::vector<int32_t> place(slots.num_experts, 0);
    std::vector<std::vector<int32_t>> by_slot(slots.num_slots());
    for (size_t i = 0; i < num_routes; ++i) {
      if (!is_valid_expert(ids[i], slots.num_experts)) continue;
      const auto& list = where[ids[i]];
      route_slot[i] = list.empty() ? slots.home_slot(ids[i]) : list.at(place[ids[i]]++);
      by_slot[route_slot[i]].push_back(i);
    }
    for (int32_t s = 0; s < slots.num_slots(); ++s) {
      starts[s + 1] = starts[s] + by_slot[s].size();
      send.insert(send.end(), by_slot[s].begin(), by_slot[s].end());
    }
  }
};

// Popularity of 384 experts as in the paper's mixed trace (Top-1/2/4/8/16 hold
// 4.69/8.07/13.02/19.92/29.40 %), with a decaying tail; shuffled. Other sizes are cut or repeated.
inline std::vector<double> paper_popularity(int32_t num_experts, std::mt19937& rng) {
  std::vector<double> share;
  for (int i = 0; i < num_experts; ++i) {
    const int at = i % 384;
    share.push_back(at == 0   ? 4.69
                    : at == 1 ? 3.38
                    : at < 4  ? 2.475
                    : at < 8  ? 1.725
                    : at < 16 ? 1.185
                              : 0.9 * std::exp(-(at - 16) / 79.0));
  }
  std::shuffle(share.begin(), share.end(), rng);
  return share;
}

}  // namespace iser::cuda
