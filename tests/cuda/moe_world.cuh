// The devices of a Domain as fused_moe sees them. The plan, send lists and replicas are made here
// from the C++ core's plan, or by the plan and replication kernels. Devices share the GPUs there
// are.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "ffi/cuda/replication.cuh"
#include "tests/cuda/moe_problem.cuh"

namespace iser::cuda {

constexpr uint64_t kSizesDigest = 0x5157;
constexpr uint32_t kDomainId = 7, kProcessMark = 77;
constexpr int32_t kNumBanks = 2;
constexpr uint64_t kLaunchNs = 400'000;      // in which the host launches what is timed
constexpr size_t kTailGuard = 256;           // bytes behind y and the workspace
constexpr size_t kWholeSmBytes = 200 << 10;  // shared memory beside which no CTA of tensor fits

// Spins, then marks READY for the device's ranks.
static __global__ void ready_kernel(const DeviceTable* table, uint32_t generation, uint64_t ns) {
  const uint64_t begin = global_ns();
  while (global_ns() - begin < ns) {
  }
  for (int32_t v = 0; v < table->ranks_per_device; ++v) {
    arrive(*table, Stage::kReady, table->first_rank + v, generation);
  }
}

// Each CTA stays until all have begun, or the Domain has failed.
static __global__ void meet_kernel(const DeviceTable* table, uint32_t* met) {
  if (threadIdx.x == 0) {
    atomicAdd(met, 1u);
    while (load_relaxed(met) < gridDim.x && !has_failed(*table)) {
    }
  }
}

static __global__ void spin_kernel(uint64_t ns) {
  const uint64_t begin = global_ns();
  while (global_ns() - begin < ns) {
  }
}

struct MoeRun {
  FusedOptions options;
  bool is_balanced = true;
  int32_t max_routes_per_rank = 1 << 20;
  uint64_t late_ready_ns = 0;  // replicas and READY come this much later
  bool has_ready = true;
  int32_t whole_sms = 0;                // that READY needs at once, as a copy of so many CTAs does
  bool by_kernels = false;              // the plan and the copy by their kernels
  const cudaEvent_t* starts = nullptr;  // a device each, before the plan; by kernels only
  double settle_ms = 0;                 // from the call's preparation to the kernels of its plan
};

// Memory of a device, poisoned where a call must not read before it writes.
struct MoeDevice {
  int gpu;
  int32_t first_rank, num_local;
  cudaStream_t main, copy;
  DeviceArray<uint8_t> segment, table, x, y, weights[kMaxPlanes];
  std::unique_ptr<DeviceArray<uint8_t>> workspace;
  DeviceArray<float> topk_weights;
  DeviceArray<int32_t> topk_ids, route_slot, broadcasts, quota, loads, scalars;
  DeviceArray<int32_t> out_route_slot, out_broadcasts, out_quota, out_loads, out_scalars;
  DeviceArray<uint32_t> ticket, met;
  DeviceArray<Directory> directory;
  DeviceArray<CallState> call;
  DeviceArray<CallCell> cell;
  DeviceArray<uint64_t> stalls, stamps;
  DeviceArray<CallTimes> times;
  PlanGrid grid{};
  size_t workspace_bytes = 0;

  MoeDevice(int gpu_, const MoeProblem& p, const DomainShape& shape, int32_t first, int32_t local)
      : gpu(gpu_),
        first_rank(first),
        num_local(local),
        segment(head_bytes(shape) + local * block_layout(shape).total),
        table(sizeof(DeviceTable)),
        x(local * p.num_tokens * shape.row_bytes()),
        y(local * p.num_tokens * shape.row_bytes() + kTailGuard),
        weights{DeviceArray<uint8_t>(weight_bytes(p, shape, local, kGatePlane)),
                DeviceArray<uint8_t>(weight_bytes(p, shape, local, kUpPlane)),
                DeviceArray<uint8_t>(weight_bytes(p, shape, local, kDownPlane)),
                DeviceArray<uint8_t>(weight_bytes(p, shape, local, kGateBiasPlane)),
                DeviceArray<uint8_t>(weight_bytes(p, shape, local, kUpBiasPlane)),
                DeviceArray<uint8_t>(weight_bytes(p, shape, local, kDownBiasPlane))},
        topk_weights(local * p.num_routes()),
        topk_ids(local * p.num_routes()),
        route_slot(local * p.num_routes()),
        broadcasts(max_rows(shape) * 6),
        quota(max_rows(shape) * shape.slots.num_ranks),
        loads(2 * shape.slots.num_ranks),
        scalars(3),
        out_route_slot(local * p.num_routes()),
        out_broadcasts(max_rows(shape) * 6),
        out_quota(max_rows(shape) * shape.slots.num_ranks),
        out_loads(2 * shape.slots.num_ranks),
        out_scalars(3),
        ticket(kNumWords),
        met(1),
        directory(1),
        call(1),
        cell(1),
        stalls(local * static_cast<size_t>(Stage::kNumStages)),
        stamps(static_cast<size_t>(MoeStamp::kNumStamps)),
        times(kNumTimes) {
    int lowest = 0, highest = 0;
    CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CHECK_CUDA(cudaStreamCreateWithPriority(&main, cudaStreamNonBlocking, lowest));
    CHECK_CUDA(cudaStreamCreateWithPriority(&copy, cudaStreamNonBlocking, highest));
    segment.fill(0);
    stalls.fill(0);
    times.fill(0);
    call.fill(0);
    ticket.put({kDomainId, static_cast<uint32_t>(first), kProcessMark, 0});
    Directory entries{};
    entries.mark = kProcessMark;
    entries.entries[kDomainId % kMaxDomains] = {kDomainId,
                                                reinterpret_cast<const DeviceTable*>(table.data)};
    directory.put({entries});
  }
  ~MoeDevice() {
    cudaSetDevice(gpu);
    cudaStreamDestroy(main);
    cudaStreamDestroy(copy);
  }

  static size_t max_rows(const DomainShape& shape) {
    return static_cast<size_t>(shape.slots.num_ranks) * shape.slots.num_helper_slots;
  }
  static size_t weight_bytes(const MoeProblem& p, const DomainShape& shape, int32_t local,
                             int32_t plane) {
    const size_t layers = p.is_stacked ? p.num_layers : 1;
    return layers * local * shape.slots.num_home() * shape.bundle().planes[plane].bytes;
  }
  static PlanOutputs outputs(const DeviceArray<int32_t>& route_slot,
                             const DeviceArray<int32_t>& broadcasts,
                             const DeviceArray<int32_t>& quota, const DeviceArray<int32_t>& loads,
                             const DeviceArray<int32_t>& scalars) {
    return {route_slot.data,  broadcasts.data,
            quota.data,       scalars.data,
            loads.data,       loads.data + loads.count / 2,
            scalars.data + 1, reinterpret_cast<uint32_t*>(scalars.data + 2)};
  }
  PlanOutputs plan() const { return outputs(route_slot, broadcasts, quota, loads, scalars); }
  PlanOutputs out_plan() const {
    return outputs(out_route_slot, out_broadcasts, out_quota, out_loads, out_scalars);
  }
};

class MoeWorld {
 public:
  MoeWorld(const MoeProblem& p, int32_t num_devices, int num_gpus,
           uint64_t timeout_ns = 5'000'000'000ull)
      : problem(p),
        shape(p.shape(kNumBanks)),
        layout(block_layout(shape)),
        num_local(p.slots.num_ranks / num_devices) {
    for (int32_t d = 0; d < num_devices; ++d) {
      CHECK_CUDA(cudaSetDevice(d % num_gpus));
      devices.push_back(
          std::make_unique<MoeDevice>(d % num_gpus, p, shape, d * num_local, num_local));
    }
    for (int32_t d = 0; d < num_devices; ++d) {
      CHECK_CUDA(cudaSetDevice(devices[d]->gpu));
      write_table(d, timeout_ns);
      fill_inputs(*devices[d]);
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }

  MoeProblem problem;
  const DomainShape shape;
  const BlockLayout layout;
  const int32_t num_local;
  uint32_t generation = 0;
  std::vector<std::unique_ptr<MoeDevice>> devices;
  int32_t num_broadcasts = 0;  // of the last plan

  DeviceHead* head(int32_t d) const {
    return reinterpret_cast<DeviceHead*>(devices[d]->segment.data);
  }
  BlockView block(int32_t rank) const {
    const MoeDevice& device = *devices[rank / num_local];
    return {device.segment.data + head_bytes(shape) + rank % num_local * layout.total, &layout};
  }
  const DeviceTable* table(int32_t d) const {
    return reinterpret_cast<const DeviceTable*>(devices[d]->table.data);
  }
  ProcessWords words(int32_t d) const {
    ProcessWords words;
    CHECK_CUDA(cudaMemcpy(&words, head(d), sizeof words, cudaMemcpyDefault));
    return words;
  }

  // As if all generations before this one had run.
  void begin_at(uint32_t first) {
    generation = first - 1;
    for (size_t d = 0; d < devices.size(); ++d) {
      CHECK_CUDA(cudaSetDevice(devices[d]->gpu));
      DeviceHead words{};
      for (uint32_t& word : words.words.arrivals) word = generation * shape.slots.num_ranks;
      words.generation = generation;
      set(head(d), &words, 1);
      RankWords of_rank{};
      for (uint32_t& word : of_rank.arrived) word = generation;
      for (int32_t v = 0; v < num_local; ++v) set(block(d * num_local + v).words(), &of_rank, 1);
    }
  }

  // Everything up to the launch of fused_moe, on all devices.
  void prepare(const MoeRun& run) {
    const auto began = std::chrono::steady_clock::now();
    ++generation;
    for (auto& device : devices) poison(*device, run);
    while (run.by_kernels && ms_since(began) < run.settle_ms) {
    }
    run.by_kernels ? plan_by_kernels(run) : plan_by_hand(run);
  }

  static double ms_since(std::chrono::steady_clock::time_point began) {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - began)
        .count();
  }

  FusedLaunch launch(int32_t d, const MoeRun& run) const {
    const MoeDevice& device = *devices[d];
    FusedLaunch launch{};
    launch.directory = device.directory.data;
    launch.ticket = device.ticket.data;
    launch.sizes = kSizesDigest;
    launch.shape = shape;
    launch.ranks_per_device = num_local;
    launch.num_tokens = problem.num_tokens;
    launch.max_routes_per_rank = run.max_routes_per_rank;
    launch.dtype = problem.dtype;
    launch.x = device.x.data;
    launch.topk_weights = device.topk_weights.data;
    for (int i = 0; i < layout.bundle.num_planes; ++i) launch.weights[i] = device.weights[i].data;
    launch.num_stacked = problem.is_stacked ? problem.num_layers : 0;
    launch.y = device.y.data;
    launch.plan = device.out_plan();
    launch.workspace = device.workspace->data;
    launch.stamps = device.stamps.data;
    launch.options = run.options;
    return launch;
  }

  void fused(int32_t d, const MoeRun& run) const {
    CHECK_CUDA(cudaSetDevice(devices[d]->gpu));
    CHECK_CUDA(launch_fused(launch(d, run), devices[d]->main));
  }

  void sync() const {
    for (const auto& device : devices) {
      CHECK_CUDA(cudaSetDevice(device->gpu));
      CHECK_CUDA(cudaStreamSynchronize(device->main));
      CHECK_CUDA(cudaStreamSynchronize(device->copy));
    }
  }

  // One call on all devices; y of all ranks.
  std::vector<uint8_t> call(const MoeRun& run) {
    prepare(run);
    for (size_t d = 0; d < devices.size(); ++d) fused(d, run);
    sync();
    return outputs();
  }

  std::vector<uint8_t> outputs() const {
    std::vector<uint8_t> all;
    for (const auto& device : devices) {
      std::vector<uint8_t> y = device->y.get();
      all.insert(all.end(), y.begin(), y.end() - kTailGuard);
    }
    return all;
  }

  // Nobody has failed, nothing was written past its end, and the call has ended (that of device 0
  // where the Domain may have failed).
  std::string check_state(bool may_fail = false) const {
    for (size_t d = 0; d < devices.size(); ++d) {
      const MoeDevice& device = *devices[d];
      const ProcessWords seen = words(d);
      if (seen.aborted != 0 && !may_fail) {
        char text[200];
        std::snprintf(text, sizeof text,
                      "device %zu failed: code %d rank %d peer %d stage %d expected %llu found "
                      "%llu",
                      d, seen.error.code, seen.error.rank, seen.error.peer, seen.error.stage,
                      static_cast<unsigned long long>(seen.error.expected),
                      static_cast<unsigned long long>(seen.error.found));
        return text;
      }
      const bool has_run = !may_fail || d == 0;
      if (has_run && device.call.get()[0].is_in_flight != 0) return "the call is still in flight";
      if (!is_guard_at(device.y.data + device.y.count - kTailGuard, kTailGuard)) {
        return "guard behind y";
      }
      if (!is_guard_at(device.workspace->data + device.workspace_bytes, kTailGuard)) {
        return "guard behind the workspace";
      }
    }
    for (int32_t rank = 0; rank < shape.slots.num_ranks; ++rank) {
      for (int section = 0; section < kNumSections; ++section) {
        if (!is_guard_at(block(rank).base + layout.guard(section), kGuardBytes)) {
          return std::string("guard behind ") + section_name(static_cast<Section>(section));
        }
      }
    }
    return "";
  }

  // The plan that the program sees is the one that was made.
  std::string check_plan_outputs() const {
    for (const auto& d : devices) {
      std::string why;
      const auto check = [&](const char* what, const DeviceArray<int32_t>& got,
                             const DeviceArray<int32_t>& want) {
        if (why.empty()) {
          why = first_difference(what, got.get().data(), want.get().data(), want.count);
        }
      };
      check("route_slot", d->out_route_slot, d->route_slot);
      check("broadcasts", d->out_broadcasts, d->broadcasts);
      check("quota", d->out_quota, d->quota);
      check("loads", d->out_loads, d->loads);
      check("scalars", d->out_scalars, d->scalars);
      if (!why.empty()) return why;
    }
    return "";
  }

  static bool is_guard_at(const uint8_t* device_bytes, size_t count) {
    std::vector<uint8_t> bytes(count);
    CHECK_CUDA(cudaMemcpy(bytes.data(), device_bytes, count, cudaMemcpyDefault));
    return std::all_of(bytes.begin(), bytes.end(), [](uint8_t b) { return b == kGuardByte; });
  }

  template <typename T>
  static void set(T* to, const T* from, size_t count) {
    if (count > 0) CHECK_CUDA(cudaMemcpy(to, from, count * sizeof(T), cudaMemcpyDefault));
  }

 private:
  void write_table(int32_t d, uint64_t timeout_ns) {
    const MoeDevice& device = *devices[d];
    DeviceTable table{};
    table.shape = shape;
    table.layout = layout;
    table.num_devices = devices.size();
    table.ranks_per_device = num_local;
    table.device = d;
    table.first_rank = d * num_local;
    table.num_layers = problem.num_layers;
    table.sizes = kSizesDigest;
    table.timeout_ns = table.startup_timeout_ns = timeout_ns;
    table.call = device.call.data;
    table.topk_ids = device.topk_ids.data;
    table.plan = device.plan();
    table.stalls = device.stalls.data;
    table.times = device.times.data;
    for (size_t other = 0; other < devices.size(); ++other) table.heads[other] = head(other);
    for (int32_t r = 0; r < shape.slots.num_ranks; ++r) table.blocks[r] = block(r).base;
    CHECK_CUDA(cudaMemcpy(device.table.data, &table, sizeof table, cudaMemcpyHostToDevice));
    for (int32_t v = 0; v < num_local; ++v) {
      for (int section = 0; section < kNumSections; ++section) {
        CHECK_CUDA(cudaMemset(block(d * num_local + v).base + layout.guard(section), kGuardByte,
                              kGuardBytes));
      }
    }
  }

  void fill_inputs(MoeDevice& device) const {
    const size_t home = shape.slots.num_home();
    const int32_t layers = problem.is_stacked ? problem.num_layers : 1;
    for (DeviceArray<uint8_t>& weights : device.weights) weights.fill(0);  // padding of planes
    std::vector<float> weights;
    std::vector<int32_t> ids;
    for (int32_t v = 0; v < num_local; ++v) {
      const int32_t rank = device.first_rank + v;
      problem.fill_tokens(device.x.data + v * problem.num_tokens * shape.row_bytes(), rank);
      for (size_t route = 0; route < problem.num_routes(); ++route) {
        weights.push_back(problem.weight(rank, route));
      }
      ids.insert(ids.end(), problem.ids[rank].begin(), problem.ids[rank].end());
      for (int32_t layer = 0; layer < layers; ++layer) {
        for (int i = 0; i < layout.bundle.num_planes; ++i) {
          const size_t plane = layout.bundle.planes[i].bytes;
          problem.fill_experts(device.weights[i].data + (layer * num_local + v) * home * plane, i,
                               layer, rank * home, home);
        }
      }
    }
    device.topk_weights.put(weights);
    device.topk_ids.put(ids);
  }

  void poison(MoeDevice& device, const MoeRun& run) {
    CHECK_CUDA(cudaSetDevice(device.gpu));
    device.workspace_bytes = fused_workspace_bytes(
        shape, num_local, problem.num_tokens, run.max_routes_per_rank, problem.dtype, run.options);
    const size_t wanted = device.workspace_bytes + kTailGuard;
    if (!device.workspace || device.workspace->count != wanted) {
      device.workspace.reset();
      device.workspace = std::make_unique<DeviceArray<uint8_t>>(wanted);
    }
    device.workspace->fill(0xff);
    device.y.fill(0xff);
    CHECK_CUDA(cudaMemset(device.workspace->data + device.workspace_bytes, kGuardByte, kTailGuard));
    CHECK_CUDA(cudaMemset(device.y.data + device.y.count - kTailGuard, kGuardByte, kTailGuard));
    for (DeviceArray<int32_t>* array :
         {&device.out_route_slot, &device.out_broadcasts, &device.out_quota, &device.out_loads,
          &device.out_scalars}) {
      array->fill(0x7b);
    }
    device.stamps.fill(0);
    for (int32_t v = 0; v < num_local; ++v) {
      const BlockView own = block(device.first_rank + v);
      for (Section section : {Section::kTokens, Section::kCombine, Section::kBanks}) {
        CHECK_CUDA(cudaMemset(own.section<uint8_t>(section), 0xff,
                              layout.bytes[static_cast<int>(section)]));
      }
    }
    const CallState state{{problem.layer, 0, run.is_balanced}, 1, 0};
    CHECK_CUDA(cudaMemcpy(device.call.data, &state, sizeof(CallState), cudaMemcpyHostToDevice));
    CHECK_CUDA(cudaDeviceSynchronize());
  }

  CallTag tag(bool is_balanced) const {
    return {generation, problem.layer, problem.num_tokens, is_balanced, 0, 0, {}};
  }

  // Of the rank's first home expert in the call's layer.
  uint8_t* home_plane(int32_t rank, int32_t plane) const {
    const size_t layer = problem.is_stacked ? problem.layer : 0;
    const size_t first = (layer * num_local + rank % num_local) * shape.slots.num_home();
    return devices[rank / num_local]->weights[plane].data +
           first * layout.bundle.planes[plane].bytes;
  }

  void plan_by_hand(const MoeRun& run) {
    const PlanConfig config = problem.config(run.is_balanced);
    const std::vector<int32_t> counts = count_ids(config, problem.ids);
    const CorePlan plan(config, counts, nullptr);
    num_broadcasts = plan.num_broadcasts;
    std::vector<MailTag> tags;
    for (int32_t r = 0; r < shape.slots.num_ranks; ++r) {
      tags.push_back({tag(run.is_balanced)});
      for (int i = 0; i < layout.bundle.num_planes; ++i) {
        tags[r].tag.weights[i] = reinterpret_cast<uint64_t>(home_plane(r, i));
      }
    }
    for (size_t d = 0; d < devices.size(); ++d) {
      MoeDevice& device = *devices[d];
      CHECK_CUDA(cudaSetDevice(device.gpu));
      set(mail_tags(shape, head(d), generation), tags.data(), tags.size());
      std::vector<int32_t> route_slot, loads = plan.load_before;
      loads.insert(loads.end(), plan.load.begin(), plan.load.end());
      for (int32_t v = 0; v < num_local; ++v) {
        const int32_t rank = device.first_rank + v;
        const CoreRoutes routes(config, plan, counts, problem.ids[rank].data(),
                                problem.num_routes(), rank);
        route_slot.insert(route_slot.end(), routes.route_slot.begin(), routes.route_slot.end());
        const BlockView own = block(rank);
        set(own.section<int32_t>(Section::kSendStarts), routes.starts.data(), routes.starts.size());
        set(own.section<int32_t>(Section::kSendRoutes), routes.send.data(), routes.send.size());
        set(&own.words()->plan_hash, &plan.hash, 1);
      }
      device.route_slot.put(route_slot);
      device.broadcasts.put(std::vector<int32_t>(
          reinterpret_cast<const int32_t*>(plan.broadcasts.data()),
          reinterpret_cast<const int32_t*>(plan.broadcasts.data() + plan.broadcasts.size())));
      device.quota.put(plan.quota);
      device.loads.put(loads);
      device.scalars.put({plan.num_broadcasts, 0, static_cast<int32_t>(generation)});
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    for (size_t d = 0; d < devices.size(); ++d) copy_by_hand(d, plan, run);
  }

  // On the COPY stream, maybe late: replicas to this device's helper slots, then READY.
  void copy_by_hand(int32_t d, const CorePlan& plan, const MoeRun& run) {
    const MoeDevice& device = *devices[d];
    CHECK_CUDA(cudaSetDevice(device.gpu));
    spin_kernel<<<1, 1, 0, device.copy>>>(run.late_ready_ns);
    const size_t home = shape.slots.num_home();
    for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
      const Broadcast& row = plan.broadcasts[b];
      const Group group = row.group(shape.slots.num_ranks);
      for (int32_t r = group.begin; r < group.end; ++r) {
        if (r == row.owner || r / num_local != d) continue;
        uint8_t* to = block(r).helper(shape, problem.layer % kNumBanks, row.helper_idx);
        for (int i = 0; i < layout.bundle.num_planes; ++i) {
          const PlaneLayout& plane = layout.bundle.planes[i];
          CHECK_CUDA(cudaMemcpyAsync(to + plane.offset,
                                     home_plane(row.owner, i) + row.expert % home * plane.bytes,
                                     plane.bytes, cudaMemcpyDefault, device.copy));
        }
      }
    }
    if (run.has_ready) {
      if (run.whole_sms > 0) {
        CHECK_CUDA(cudaMemsetAsync(device.met.data, 0, sizeof(uint32_t), device.copy));
        CHECK_CUDA(cudaFuncSetAttribute(meet_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(kWholeSmBytes)));
        meet_kernel<<<run.whole_sms, 32, kWholeSmBytes, device.copy>>>(table(d), device.met.data);
      }
      ready_kernel<<<1, 32, 0, device.copy>>>(table(d), generation, 0);
      CHECK_CUDA(cudaGetLastError());
    }
  }

  void plan_by_kernels(const MoeRun& run) {
    for (size_t d = 0; d < devices.size(); ++d) {
      MoeDevice& device = *devices[d];
      CHECK_CUDA(cudaSetDevice(device.gpu));
      const PlanConfig config = problem.config(true);
      CHECK_CUDA(prepare_plan(config, num_local, shape.max_routes(), 8, &device.grid));
      device.cell.put({{table(d), {problem.layer, 0, run.is_balanced}}});
      CHECK_CUDA(cudaDeviceSynchronize());
    }
    for (size_t d = 0; d < devices.size(); ++d) {
      MoeDevice& device = *devices[d];
      CHECK_CUDA(cudaSetDevice(device.gpu));
      PlanLaunch plan{};
      plan.cell = device.cell.data;
      plan.config = problem.config(true);
      plan.num_tokens = problem.num_tokens;
      plan.top_k = problem.top_k;
      plan.is_stacked = problem.is_stacked;
      for (int i = 0; i < layout.bundle.num_planes; ++i) plan.weights[i] = device.weights[i].data;
      if (run.starts != nullptr) {
        spin_kernel<<<1, 1, 0, device.main>>>(kLaunchNs);
        CHECK_CUDA(cudaEventRecord(run.starts[d], device.main));
        CHECK_CUDA(cudaStreamWaitEvent(device.copy, run.starts[d], 0));
      }
      CHECK_CUDA(launch_plan(device.grid, plan, device.copy));
      cudaEvent_t planned;
      CHECK_CUDA(cudaEventCreateWithFlags(&planned, cudaEventDisableTiming));
      CHECK_CUDA(cudaEventRecord(planned, device.copy));
      CHECK_CUDA(cudaStreamWaitEvent(device.main, planned, 0));
      CHECK_CUDA(cudaEventDestroy(planned));
      if (run.late_ready_ns > 0) spin_kernel<<<1, 1, 0, device.copy>>>(run.late_ready_ns);
      CHECK_CUDA(launch_replication({device.cell.data, shape, {}}, device.copy));
    }
  }
};

// Loads the kernels on so many GPUs, or as many as there are, which can then address each other.
inline void prepare_gpus(int* num_gpus) {
  int found = 0;
  CHECK_CUDA(cudaGetDeviceCount(&found));
  *num_gpus = std::min(*num_gpus, found);
  for (int a = 0; a < *num_gpus; ++a) {
    CHECK_CUDA(cudaSetDevice(a));
    CHECK_CUDA(prepare_fused());
    CHECK_CUDA(prepare_replication());
    for (int b = 0; b < *num_gpus; ++b) {
      if (a != b) CHECK_CUDA(cudaDeviceEnablePeerAccess(b, 0));
    }
  }
}

}  // namespace iser::cuda
