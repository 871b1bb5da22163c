// The CTAs of a device share its slices evenly, whichever of its ranks they belong to; the last to
// end arrives at READY for all of them. Nobody waits for a peer.
#include "ffi/cuda/replication.cuh"

#include "ffi/cuda/copy_ring.cuh"
#include "ffi/cuda/fabric.cuh"

namespace iser::cuda {
namespace {

constexpr int kMaxStages = 32, kMaxClusterSize = 8;
constexpr size_t kMaxSharedBytes = (227 << 10) - 128;  // dynamic, of a CTA, sm_90

// The last CTA of the device arrives for all its ranks. Called by all threads.
__device__ void publish(const Context& context) {
  __shared__ bool is_arriving;
  const DeviceTable& table = context.table;
  if (!is_last_cta(&table.call->ctas_done)) return;
  if (threadIdx.x == 0) {
    table.call->ctas_done = 0;
    table.times_of(context.generation).copy_end = global_ns();
    is_arriving = !has_failed(table);
  }
  __syncthreads();
  if (!is_arriving || threadIdx.x >= 32) return;
  for (int32_t v = 0; v < table.ranks_per_device; ++v) {
    arrive(table, Stage::kReady, table.first_rank + v, context.generation);
  }
}

template <class Fabric>
__global__ void __launch_bounds__(kThreads)
    replication_kernel(const ReplicationLaunch launch, uint8_t* const* windows) {
  extern __shared__ __align__(128) uint8_t dynamic_shared[];
  const DeviceTable* table = launch.cell->table;
  if (!table) return;
  const Context context = prepare(launch, *table, dynamic_shared);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    table->times_of(context.generation).copy_begin = global_ns();
  }
  const int32_t warp = threadIdx.x / 32, ring = warp / 2;
  if (ring == kNumRings) {
    if (!context.is_bulk) copy_plain(context);
  } else if (threadIdx.x % 32 == 0) {
    if (warp % 2 == 0) {
      load_slices(context, ring);
    } else {
      store_slices<Fabric>(context, ring, windows);
    }
  }
  publish(context);
}

#if ISER_HAS_MULTICAST
// Compiled so that its instructions can be looked at; nothing launches it yet.
template __global__ void replication_kernel<MulticastFabric>(const ReplicationLaunch,
                                                             uint8_t* const*);
#endif

__global__ void __launch_bounds__(kRankThreads) ready_gate_kernel(const CallCell* cell) {
  __shared__ bool is_ready;
  const DeviceTable* table = cell->table;
  if (!table) return;
  const uint32_t generation = *table->plan.generation;
  const int32_t first = table->first_rank;
  const int32_t layer = mail_tags(table->shape, table->head(), generation)[first].tag.layer;
  if (threadIdx.x == 0) is_ready = wait(*table, Stage::kReady, first, generation, layer);
  __syncthreads();
  if (is_ready && threadIdx.x < table->shape.slots.num_ranks) {
    check_plan(*table, threadIdx.x, generation, layer);
  }
}

}  // namespace

size_t replication_shared_bytes(const DomainShape& shape, const ReplicationOptions& options) {
  return shared_views(shape, options, nullptr).bytes;
}

const char* replication_options_error(const DomainShape& shape, const ReplicationOptions& options) {
  const ReplicationOptions& o = options;
  if (o.num_ctas < 1) return "num_ctas must be at least 1";
  if (o.num_stages <= kNumStoring || o.num_stages > kMaxStages) {
    return "num_stages must be 3 to 32";
  }
  if (o.slice_bytes < 128 || o.slice_bytes % 128 != 0) {
    return "slice_bytes must be a positive multiple of 128";
  }
  if (o.cluster_size < 1 || o.cluster_size > kMaxClusterSize || o.num_ctas % o.cluster_size != 0) {
    return "cluster_size must be 1 to 8 and divide num_ctas";
  }
  if (replication_shared_bytes(shape, o) > kMaxSharedBytes) {
    return "stages and tables exceed the 227 KiB of shared memory of a CTA: take fewer or smaller "
           "stages";
  }
  return nullptr;
}

cudaError_t prepare_replication() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, ready_gate_kernel);
  if (error != cudaSuccess) return error;
  return cudaFuncSetAttribute(replication_kernel<UnicastFabric>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(kMaxSharedBytes));
}

cudaError_t launch_replication(const ReplicationLaunch& launch, cudaStream_t stream) {
  const ReplicationOptions& options = launch.options;
  if (replication_options_error(launch.shape, options)) return cudaErrorInvalidValue;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = options.cluster_size;
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = options.num_ctas;
  config.blockDim = kThreads;
  config.dynamicSmemBytes = replication_shared_bytes(launch.shape, options);
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = options.cluster_size > 1 ? 1 : 0;
  uint8_t* const* no_windows = nullptr;
  return cudaLaunchKernelEx(&config, replication_kernel<UnicastFabric>, launch, no_windows);
}

cudaError_t launch_ready_gate(const CallCell* cell, cudaStream_t stream) {
  ready_gate_kernel<<<1, kRankThreads, 0, stream>>>(cell);
  return cudaGetLastError();
}

}  // namespace iser::cuda
