#include "ffi/cuda/start.cuh"

namespace iser::cuda {
namespace {

constexpr int kStartThreads = 256, kMaxStartCtas = 64;

__device__ void check_call(const DeviceTable& table, const StartLaunch& launch,
                           const CallParams& params) {
  const int32_t layers = launch.num_stacked > 0 && launch.num_stacked < table.num_layers
                             ? launch.num_stacked
                             : table.num_layers;
  ErrorWord error{0,
                  table.first_rank,
                  -1,
                  params.layer,
                  static_cast<int32_t>(Stage::kCounts),
                  load_relaxed(&table.head()->generation) + 1,
                  0,
                  0};
  if (static_cast<uint32_t>(params.layer) >= static_cast<uint32_t>(layers)) {
    error.code = static_cast<int32_t>(ErrorCode::kBadLayer);
    error.expected = layers;
    error.found = static_cast<uint64_t>(static_cast<int64_t>(params.layer));
    fail(table, error);
  } else if (table.call->is_in_flight) {
    error.code = static_cast<int32_t>(ErrorCode::kOverlap);
    fail(table, error);
  }
}

__global__ void __launch_bounds__(kStartThreads) start_kernel(const StartLaunch launch) {
  const DeviceTable* table = find_table(launch.directory, launch.handle, launch.sizes);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (first == 0) {
    const CallParams params{launch.params[0], launch.params[1], launch.params[2]};
    *launch.cell = {table, params};
    if (!table) atomicAdd(&launch.directory->num_misuse, 1u);
    if (launch.ticket) {
      for (int i = 0; i < kNumWords; ++i) launch.ticket[i] = launch.handle[i];
    }
    if (table) {
      check_call(*table, launch, params);
      const uint32_t generation = load_relaxed(&table->head()->generation) + 1;
      if (!launch.is_plan_only) {
        table->times_of(generation) = {generation, params.layer, global_ns(), 0, 0, 0, 0, 0, 0};
      }
      table->call->params = params;
      if (table->call->num_started < 2) ++table->call->num_started;
      table->call->is_in_flight = !launch.is_plan_only;
    }
  }
  if (!table || launch.is_plan_only) return;  // plan reads its operand in place
  for (int64_t i = first; i < launch.num_routes;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    table->topk_ids[i] = launch.topk_ids[i];
  }
}

__global__ void __launch_bounds__(kStartThreads) poison_kernel(const PoisonLaunch launch) {
  const DeviceTable* table = find_table(launch.directory, launch.ticket, launch.sizes);
  if (!table || has_failed(*table)) return;
  const BlockView block = table->block(table->first_rank + blockIdx.y);
  for (const Section section : {Section::kTokens, Section::kCombine}) {
    uint32_t* words = block.section<uint32_t>(section);
    const size_t count = table->layout.bytes[static_cast<int>(section)] / sizeof(uint32_t);
    const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
    for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
         i += step) {
      words[i] = 0xffffffffu;
    }
  }
}

}  // namespace

cudaError_t prepare_start() {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, start_kernel);
  return error != cudaSuccess ? error : cudaFuncGetAttributes(&attributes, poison_kernel);
}

cudaError_t launch_poison(const PoisonLaunch& launch, cudaStream_t stream) {
  const dim3 grid(kMaxStartCtas, launch.ranks_per_device);
  poison_kernel<<<grid, kStartThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

cudaError_t launch_start(const StartLaunch& launch, cudaStream_t stream) {
  const int64_t ctas = (launch.num_routes + 4 * kStartThreads - 1) / (4 * kStartThreads);
  const int64_t grid = ctas < 1 ? 1 : ctas > kMaxStartCtas ? kMaxStartCtas : ctas;
  start_kernel<<<static_cast<unsigned>(grid), kStartThreads, 0, stream>>>(launch);
  return cudaGetLastError();
}

}  // namespace iser::cuda
