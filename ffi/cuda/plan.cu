#include "ffi/cuda/plan.cuh"

#include <cooperative_groups.h>

#include "ffi/cuda/plan_arrays.cuh"
#include "ffi/cuda/plan_derive.cuh"
#include "ffi/cuda/plan_outputs.cuh"
#include "ffi/cuda/plan_rewrite.cuh"

namespace iser::cuda {
namespace {

namespace cg = cooperative_groups;

// The two halves of a barrier over the CTAs of a rank.
__device__ inline void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ inline void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

constexpr size_t kMaxSharedBytes = 227 * 1024;
constexpr size_t kMaxCountsCopy = 65 * 1024;

// Shared memory of one CTA: on the host offsets, of which none is 0. The warps' counts are dead
// once the plan begins.
struct Smem {
  int32_t* cta_counts;  // [E], read by the other CTAs of the rank
  int32_t* before_cta;  // [E]
  int32_t* flags;       // [4]
  PlanOutputs* outputs;
  CallTag* tag;
  uint32_t* packed;  // [routes of the CTA], null where they do not fit
  ExpertOrder order;
  int32_t* warp_counts;
  PlanArrays plan;
  RewriteArrays rewrite;
  int32_t* counts_copy;  // [P, copy_stride] or null
  size_t bytes;
};

Smem carve(const PlanConfig& config, size_t num_packed) {
  Smem smem{};
  Carver fixed{nullptr, 16};
  smem.cta_counts = fixed.take<int32_t>(config.slots.num_experts);
  smem.before_cta = fixed.take<int32_t>(config.slots.num_experts);
  smem.flags = fixed.take<int32_t>(4);
  smem.outputs = fixed.take<PlanOutputs>(1);
  smem.tag = fixed.take<CallTag>(1);
  if (num_packed > 0) {
    smem.packed = fixed.take<uint32_t>(num_packed);
    smem.order = {fixed.take<int32_t>(config.slots.num_experts), fixed.take<int32_t>(1),
                  fixed.take<uint16_t>(num_packed)};
  }
  Carver early = fixed, late = fixed;
  smem.warp_counts = early.take<int32_t>(kPlanThreads / 32 * config.slots.num_experts);
  carve_plan(config, late, smem.plan);
  carve_rewrite(config, kPlanThreads / 32, late, smem.rewrite);
  const size_t counts =
      static_cast<size_t>(config.slots.num_ranks) * copy_stride(config.slots.num_experts);
  const size_t copy_bytes = sizeof(int32_t) * counts;
  if (copy_bytes <= kMaxCountsCopy && late.used + copy_bytes <= kMaxSharedBytes) {
    smem.counts_copy = late.take<int32_t>(counts);
  }
  smem.bytes = early.used > late.used ? early.used : late.used;
  return smem;
}

// An array of `layout` in the CTA's shared memory.
template <typename T>
__device__ inline void place_at(T*& array, uint8_t* shared) {
  array = reinterpret_cast<T*>(shared + reinterpret_cast<uintptr_t>(array));
}
template <typename... T>
__device__ inline void place_all(uint8_t* shared, T*&... arrays) {
  (place_at(arrays, shared), ...);
}

__device__ inline Smem at_base(const Smem& layout, uint8_t* shared) {
  Smem smem = layout;
  place_all(shared, smem.cta_counts, smem.before_cta, smem.flags, smem.outputs, smem.tag,
            smem.warp_counts);
  if (smem.packed) {
    place_all(shared, smem.packed, smem.order.first, smem.order.num_routes, smem.order.routes);
  }
  if (smem.counts_copy) place_all(shared, smem.counts_copy);
  PlanArrays& plan = smem.plan;
  place_all(shared, plan.hash, plan.scalars, plan.totals, plan.load_before, plan.load,
            plan.candidate_expert, plan.candidate_total, plan.num_hosted, plan.hosted, plan.hosts,
            plan.rows, plan.expert, plan.node, plan.helper, plan.lack, plan.node_count,
            plan.node_foreign, plan.widest, plan.can_trade, plan.level, plan.schedule, plan.pairs,
            plan.pair_words);
  RewriteArrays& rewrite = smem.rewrite;
  place_all(shared, rewrite.home, rewrite.runs, rewrite.slot_start, rewrite.warp_sums,
            rewrite.run_begin, rewrite.run_start, rewrite.run_slot);
  return smem;
}

struct Stamps {
  int64_t* row;

  __device__ void mark(PlanStamp stamp) const {
    if (row && threadIdx.x == 0) row[static_cast<int32_t>(stamp)] = clock64();
  }
  __device__ void mark_ns(PlanStamp stamp) const {
    if (row && threadIdx.x == 0) row[static_cast<int32_t>(stamp)] = global_ns();
  }
};

// After a barrier since the table was last read; `version` is what it was filled for.
__device__ void update_slot_table(const PlanConfig& config, const PlanArrays& arrays,
                                  SlotTable* table, int32_t version, int32_t weights_version) {
  const int32_t slots = config.slots.num_helper_slots;
  if (version != weights_version) {
    for (int32_t i = threadIdx.x; i < config.max_broadcasts(); i += blockDim.x) {
      table->expert[i] = -1;
    }
    __syncthreads();
  }
  for (int32_t b = threadIdx.x; b < arrays.scalars[kCount]; b += blockDim.x) {
    const Hosts hosts(Row{arrays.rows[b]}, config.slots.num_ranks);
    for (int32_t r = hosts.begin; r < hosts.end; ++r) {
      table->expert[r * slots + arrays.helper[b]] = arrays.expert[b];
    }
  }
  if (threadIdx.x == 0) table->weights_version = weights_version;
}

__device__ CallTag call_tag(const PlanLaunch& call, const CallCell& cell, uint32_t generation,
                            int32_t local_idx) {
  const CallParams& params = cell.params;
  CallTag tag{generation,
              params.layer,
              call.num_tokens,
              params.is_balanced,
              call.is_plan_only,
              params.weights_version,
              {}};
  const DeviceTable& table = *cell.table;
  const size_t experts = static_cast<size_t>(table.shape.slots.num_home());
  size_t first = local_idx * experts;
  if (call.is_stacked) first += params.layer * table.ranks_per_device * experts;
  const BundleLayout& bundle = table.layout.bundle;
  for (int32_t i = 0; i < bundle.num_planes; ++i) {
    tag.weights[i] = reinterpret_cast<uint64_t>(call.weights[i]);
    if (call.weights[i]) tag.weights[i] += first * bundle.planes[i].bytes;
  }
  return tag;
}

// One warp. False, and the Domain failed, where a rank is in another call.
__device__ bool tags_agree(const DeviceTable& table, const CallTag& own, int32_t rank) {
  const MailTag* tags = mail_tags(table.shape, table.head(), own.generation);
  int32_t differing = INT32_MAX, found = 0;
  for (int32_t r = threadIdx.x % 32; r < table.shape.slots.num_ranks; r += 32) {
    const int32_t* words = reinterpret_cast<const int32_t*>(&tags[r].tag);
    const int32_t* expected = reinterpret_cast<const int32_t*>(&own);
    bool agrees = true;
    for (int i = 0; i < 6; ++i) agrees = agrees && __ldcg(words + i) == expected[i];
    if (!agrees && r < differing) differing = r, found = __ldcg(words + 1);
  }
  const int32_t peer = __reduce_min_sync(kFullWarp, differing);
  if (peer == INT32_MAX) return true;
  if (differing == peer) {
    fail(table, {static_cast<int32_t>(ErrorCode::kCallMismatch), rank, peer, own.layer,
                 static_cast<int32_t>(Stage::kCounts), own.generation,
                 static_cast<uint64_t>(own.layer), static_cast<uint64_t>(found)});
  }
  __syncwarp();
  return false;
}

// What `Plan` holds where there is none; `num_routes` of the device.
__device__ void write_failure(const PlanConfig& config, const PlanOutputs& out, int32_t num_routes,
                              uint32_t generation, int32_t status) {
  fill_no_plan(out, config.slots, num_routes);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    *out.num_broadcasts = 0;
    *out.generation = generation;
  }
  if (threadIdx.x == 0) *out.status = status;  // of any CTA: others may have met no failure
}

template <bool kOnWarp>
__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_kernel(const __grid_constant__ PlanLaunch call, const __grid_constant__ Smem layout) {
  extern __shared__ __align__(16) uint8_t shared[];
  const cg::cluster_group cluster = cg::this_cluster();
  const PlanConfig& config = call.config;
  const CallCell& cell = *call.cell;
  const DeviceTable* domain = cell.table;
  const int32_t experts = config.slots.num_experts;
  const int32_t num_ctas = cluster.num_blocks(), cta = cluster.block_rank();
  const int32_t num_local = gridDim.x / num_ctas, local_idx = blockIdx.x / num_ctas;
  const int32_t num_routes = call.num_tokens * call.top_k;
  if (!domain) {  // in every CTA
    if (call.outputs.status) {
      write_failure(config, call.outputs, num_local * num_routes, 0,
                    static_cast<int32_t>(ErrorCode::kBadHandle));
    }
    return;
  }
  const DeviceTable& table = *domain;
  const int32_t* topk_ids = call.topk_ids ? call.topk_ids : table.topk_ids;
  const int32_t rank = table.first_rank + local_idx, layer = cell.params.layer;
  const uint32_t generation = load_relaxed(&table.head()->generation) + 1;
  Smem smem = at_base(layout, shared);
  const PlanOutputs& outputs = *smem.outputs;
  const CallTag& tag = *smem.tag;
  if (threadIdx.x == 0) {
    *smem.outputs = call.outputs.status ? call.outputs : table.plan;
    *smem.tag = call_tag(call, cell, generation, local_idx);
    // Before this rank arrives, so before another CTA can find anything wrong but an earlier
    // failure.
    if (blockIdx.x == 0) *smem.outputs->status = 0;
  }
  const RouteRange range = RouteRange::of(num_routes, cta, num_ctas);
  const Stamps stamps{call.stamps
                          ? call.stamps + blockIdx.x * static_cast<int32_t>(PlanStamp::kNumStamps)
                          : nullptr};
  stamps.mark_ns(PlanStamp::kStartNs);
  stamps.mark(PlanStamp::kStart);

  // Histogram, and places within the CTA.
  for (int32_t i = threadIdx.x; i < kPlanThreads / 32 * experts; i += blockDim.x) {
    smem.warp_counts[i] = 0;
  }
  __syncthreads();
  int32_t* route_slot = outputs.route_slot + static_cast<size_t>(local_idx) * num_routes;
  uint32_t* packed =
      smem.packed ? smem.packed : reinterpret_cast<uint32_t*>(route_slot) + range.begin;
  rank_in_warp(topk_ids + static_cast<size_t>(local_idx) * num_routes, range, experts,
               smem.warp_counts, packed);
  __syncthreads();
  sum_warps(experts, smem.warp_counts, smem.cta_counts);
  cluster.sync();
  stamps.mark(PlanStamp::kRanked);

  // The rank's first CTA stores the rank's counts to every device; all learn what comes before
  // them.
  DomainShape sizes{};  // all that mail depends on, from the parameters
  sizes.slots = config.slots;
  const int32_t num_targets = cta == 0 ? table.num_devices : 0;
  for (int32_t e = threadIdx.x; e < experts; e += blockDim.x) {
    int32_t before = 0, sum = 0;
#pragma unroll 4
    for (int32_t c = 0; c < (cta == 0 ? num_ctas : cta); ++c) {
      sum += cluster.map_shared_rank(smem.cta_counts, c)[e];
    }
    if (cta > 0) before = sum;
    smem.before_cta[e] = before;
    for (int32_t d = 0; d < num_targets; ++d) {
      mail_counts(sizes, table.heads[d], generation)[rank * experts + e] = sum;
    }
  }
  if (cta == 0 && threadIdx.x < table.num_devices) {
    mail_tags(sizes, table.heads[threadIdx.x], generation)[rank].tag = tag;
  }
  __syncthreads();
  if (cta == 0 && threadIdx.x < 32) arrive(table, Stage::kCounts, rank, generation);
  // The peers' shared memory has been read; nobody leaves before all have.
  cluster_arrive();
  stamps.mark(PlanStamp::kArrived);
  finish_places(range, experts, smem.warp_counts, smem.before_cta, packed);
  if (threadIdx.x == 0) smem.flags[0] = wait(table, Stage::kCounts, rank, generation, layer);
  __syncthreads();
  stamps.mark(PlanStamp::kExchanged);
  if (smem.flags[0] == 0) {
    write_failure(config, outputs, num_local * num_routes, generation, error_code(table));
    cluster_wait();
    return;
  }

  if (threadIdx.x == 0) {
    *smem.plan.hash = 0;
    smem.flags[1] = 1;
  }
  // The last CTA writes what the device has once.
  const bool is_writer = blockIdx.x == gridDim.x - 1;
  SlotTable* slot_table = nullptr;
  int32_t slot_version = 0;
  if (is_writer && table.slot_tables) {
    slot_table = reinterpret_cast<SlotTable*>(table.slot_tables + layer % table.shape.num_banks *
                                                                      slot_table_bytes(config));
    slot_version = slot_table->weights_version;
  }
  const int32_t* resident =
      slot_table && slot_version == cell.params.weights_version ? slot_table->expert : nullptr;
  uint64_t hash = 0;
  PlanConfig effective = config;
  if (!cell.params.is_balanced) effective.gain_threshold = INT32_MAX;  // never worth it
  derive<kOnWarp>(
      effective, mail_counts(sizes, table.head(), generation), smem.plan, smem.counts_copy, stamps,
      [&](int32_t first) {
        start_rewrite(config, smem.plan, smem.rewrite, rank, first);
        if (warp_index() == 1 && !tags_agree(table, tag, rank)) smem.flags[1] = 0;
        if (warp_index() == 2 && smem.packed) {
          order_experts(experts, smem.cta_counts, smem.before_cta, smem.order);
        }
      },
      [&](int32_t b) {
        if (!is_writer || smem.flags[1] == 0) return;
        write_row(config, smem.plan, b, resident, reinterpret_cast<Broadcast*>(outputs.broadcasts),
                  hash);
      });
  if (smem.flags[1] == 0) {
    write_failure(config, outputs, num_local * num_routes, generation, error_code(table));
    cluster_wait();
    return;
  }

  // Every rank has read the last generation: it has arrived with this one.
  share_out(config, smem.plan, smem.rewrite, rank);
  if (is_writer) {
    write_loads(config, smem.plan, hash, outputs.load_before, outputs.load, outputs.num_broadcasts);
  }
  __syncthreads();
  const int32_t num_slots = config.slots.num_slots();
  scan_slots(num_slots, smem.rewrite);
  spread_starts(config, smem.plan, smem.rewrite);
  const BlockView block = table.block(rank);
  int32_t* send_routes = block.section<int32_t>(Section::kSendRoutes);
  rewrite_routes(smem.rewrite, range, smem.order, packed, route_slot, send_routes);
  if (smem.packed) {
    __syncthreads();
    store_ordered(range, smem.order, packed, send_routes);
  }
  if (cta == 0) {
    int32_t* starts = block.section<int32_t>(Section::kSendStarts);
    for (int32_t s = threadIdx.x; s <= num_slots; s += blockDim.x) {
      starts[s] = smem.rewrite.slot_start[s];
    }
  }
  write_quota(config, smem.plan, outputs.quota, blockIdx.x, gridDim.x);
  if (is_writer) {
    if (slot_table && !call.is_plan_only) {
      update_slot_table(config, smem.plan, slot_table, slot_version, cell.params.weights_version);
    }
    for (int32_t v = threadIdx.x; v < table.ranks_per_device; v += blockDim.x) {
      table.block(table.first_rank + v).words()->plan_hash = *smem.plan.hash;
    }
    if (threadIdx.x == 0) {
      *outputs.generation = generation;
      table.head()->generation = generation;
      if (!call.is_plan_only) table.times_of(generation).planned = global_ns();
    }
  }
  if (call.is_plan_only && cta == 0 && threadIdx.x < 32) {
    // No other op of this generation comes: its stages are passed here, and publish nothing.
    for (Stage stage : {Stage::kStaged, Stage::kDispatch, Stage::kReady}) {
      pass(table, stage, rank, generation);
    }
  }
  stamps.mark(PlanStamp::kEnd);
  stamps.mark_ns(PlanStamp::kEndNs);
  cluster_wait();
}

template <bool kOnWarp>
__global__ void __launch_bounds__(kPlanThreads, 1)
    plan_counts_kernel(const __grid_constant__ PlanCountsLaunch call,
                       const __grid_constant__ Smem layout) {
  extern __shared__ __align__(16) uint8_t shared[];
  const PlanConfig& config = call.config;
  Smem smem = at_base(layout, shared);
  const Stamps stamps{call.stamps};
  stamps.mark_ns(PlanStamp::kStartNs);
  stamps.mark(PlanStamp::kExchanged);
  if (threadIdx.x == 0) *smem.plan.hash = 0;
  uint64_t hash = 0;
  derive<kOnWarp>(
      config, call.counts, smem.plan, smem.counts_copy, stamps, [](int32_t) {},
      [&](int32_t b) {
        write_row(config, smem.plan, b, call.resident, call.plan.broadcasts, hash);
      });
  write_loads(config, smem.plan, hash, call.plan.load_before, call.plan.load,
              call.plan.num_broadcasts);
  write_quota(config, smem.plan, call.plan.quota, 0, 1);
  __syncthreads();
  if (threadIdx.x == 0) {
    *call.plan.target = smem.plan.scalars[kTarget];
    *call.hash = *smem.plan.hash;
  }
  stamps.mark(PlanStamp::kEnd);
  stamps.mark_ns(PlanStamp::kEndNs);
}

bool fits_warp(const PlanConfig& config) { return config.slots.num_ranks <= 32; }

auto* kernel_of(const PlanConfig& config) {
  return fits_warp(config) ? plan_kernel<true> : plan_kernel<false>;
}

auto* counts_kernel_of(const PlanConfig& config) {
  return fits_warp(config) ? plan_counts_kernel<true> : plan_counts_kernel<false>;
}

bool is_supported(const PlanConfig& config) {
  const SlotSpace& slots = config.slots;
  return slots.num_ranks >= 1 && slots.num_ranks <= kMaxRanks &&
         slots.num_experts <= kMaxPlanExperts && slots.num_experts % slots.num_ranks == 0 &&
         slots.num_helper_slots <= kMaxPlanHelperSlots && config.min_group_size >= 1;
}

cudaLaunchConfig_t plan_config(const PlanGrid& grid, cudaLaunchAttribute (&attributes)[2]) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(grid.ranks_per_device * grid.ctas_per_rank);
  config.blockDim = dim3(kPlanThreads);
  config.dynamicSmemBytes = grid.smem_bytes;
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = grid.ctas_per_rank;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  config.attrs = attributes;
  config.numAttrs = grid.is_cooperative ? 2 : 1;
  return config;
}

size_t packed_routes(const PlanGrid& grid, int64_t max_routes) {
  return (max_routes + grid.ctas_per_rank - 1) / grid.ctas_per_rank;
}

}  // namespace

cudaError_t prepare_plan(const PlanConfig& config, int32_t ranks_per_device, int64_t max_routes,
                         int32_t max_ctas_per_rank, PlanGrid* grid) {
  if (!is_supported(config) || max_routes >= (1 << kPlaceBits) - 1) return cudaErrorInvalidValue;
  const auto kernel = kernel_of(config);
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMaxSharedBytes);
  if (error != cudaSuccess) return error;
  if (max_ctas_per_rank > 8) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return error;
  }
  for (int32_t ctas = 16; ctas >= 1; ctas /= 2) {
    if (ctas > max_ctas_per_rank) continue;
    *grid = {ranks_per_device, ctas, max_routes, 0, true, true};
    grid->smem_bytes = carve(config, packed_routes(*grid, max_routes)).bytes;
    if (static_cast<size_t>(grid->smem_bytes) > kMaxSharedBytes) {
      grid->is_packed_shared = false;
      grid->smem_bytes = carve(config, 0).bytes;
    }
    if (static_cast<size_t>(grid->smem_bytes) > kMaxSharedBytes) return cudaErrorInvalidValue;
    cudaLaunchAttribute attributes[2];
    PlanGrid probe = *grid;
    probe.is_cooperative = false;
    const cudaLaunchConfig_t launch = plan_config(probe, attributes);
    int clusters = 0;
    error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &launch);
    if (error == cudaSuccess && clusters >= ranks_per_device) return cudaSuccess;
    if (error != cudaSuccess) cudaGetLastError();  // this cluster size is not to be had here
  }
  return error != cudaSuccess ? error : cudaErrorCooperativeLaunchTooLarge;
}

cudaError_t launch_plan(const PlanGrid& grid, const PlanLaunch& launch, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config = plan_config(grid, attributes);
  config.stream = stream;
  const int64_t routes = static_cast<int64_t>(launch.num_tokens) * launch.top_k;
  if (routes > grid.max_routes) return cudaErrorInvalidValue;
  const int32_t packed = grid.is_packed_shared ? packed_routes(grid, routes) : 0;
  return cudaLaunchKernelEx(&config, kernel_of(launch.config), launch,
                            carve(launch.config, packed));
}

cudaError_t prepare_plan_counts(const PlanConfig& config) {
  if (!is_supported(config) || carve(config, 0).bytes > kMaxSharedBytes) {
    return cudaErrorInvalidValue;
  }
  return cudaFuncSetAttribute(counts_kernel_of(config), cudaFuncAttributeMaxDynamicSharedMemorySize,
                              kMaxSharedBytes);
}

cudaError_t launch_plan_counts(const PlanCountsLaunch& launch, cudaStream_t stream) {
  const Smem layout = carve(launch.config, 0);
  counts_kernel_of(launch.config)<<<1, kPlanThreads, layout.bytes, stream>>>(launch, layout);
  return cudaGetLastError();
}

}  // namespace iser::cuda
