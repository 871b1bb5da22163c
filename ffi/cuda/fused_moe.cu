#include "ffi/cuda/fused_moe.cuh"

#include "ffi/cuda/moe_begin.cuh"
#include "ffi/cuda/moe_combine.cuh"
#include "ffi/cuda/moe_plain.cuh"
#include "ffi/cuda/moe_tensor.cuh"

namespace iser::cuda {
namespace {

constexpr int32_t kWordBytes = 16;
constexpr int32_t kMaxSms = 1024;

int32_t full_tile(const DomainShape& shape) {
  return shape.is_fp8() ? Fp8Tiles::kRows : Bf16Tiles::kRows;
}

// What hidden and intermediate must be multiples of: TMA takes rows of whole 16-byte words, and
// each warpgroup stores 64 columns of h in FP8 or none.
int32_t tensor_granule(const DomainShape& shape) {
  return shape.is_fp8() ? Fp8Tiles::kInner / 2 : kWordBytes / 2;
}

bool fits_tensor(const DomainShape& shape, DType dtype) {
  const int32_t granule = tensor_granule(shape);
  return dtype == DType::kBF16 && shape.hidden % granule == 0 && shape.intermediate % granule == 0;
}

int32_t device_sms() {
  static int32_t counts[64] = {};
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess || device < 0 || device >= 64) return 1;
  if (counts[device] == 0 &&
      cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
    counts[device] = count;
  }
  return counts[device] > 0 ? counts[device] : 1;
}

PFN_cuTensorMapEncodeTiled_v12000 map_encoder() {
  static const PFN_cuTensorMapEncodeTiled_v12000 encoder = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry,
                                                               12000, cudaEnableDefault, &result);
    const bool is_found = error == cudaSuccess && result == cudaDriverEntryPointSuccess;
    return is_found ? reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(entry) : nullptr;
  }();
  return encoder;
}

// Rows of a tile. Any choice gives the same bits; small ones share few rows among more CTAs.
int32_t tensor_rows(const DomainShape& shape, int32_t num_tokens, const FusedOptions& options) {
  if (options.tile_rows != 0) return options.tile_rows;
  const int64_t mean = static_cast<int64_t>(shape.slots.num_ranks) * num_tokens * shape.top_k /
                       shape.slots.num_experts;
  return mean <= 64 ? 64 : mean <= 128 ? 128 : full_tile(shape);
}

MoeSizes moe_sizes(const DomainShape& shape, int32_t ranks_per_device, int32_t num_tokens,
                   int32_t max_routes_per_rank, DType dtype, const FusedOptions& options) {
  MoeSizes sizes{shape.slots,
                 shape.top_k,
                 shape.hidden,
                 shape.intermediate,
                 shape.element_bytes,
                 ranks_per_device,
                 num_tokens,
                 0,
                 {},
                 1,
                 shape.weight_format,
                 shape.token_format};
  const int64_t most = sizes.max_rows();
  sizes.wave_rows = static_cast<int32_t>(most < max_routes_per_rank ? most : max_routes_per_rank);
  sizes.wave_rows = at_least(sizes.wave_rows, 1);
  if (fused_engine(shape, dtype, options) == MoeEngine::kTensor) {
    const int32_t rows = tensor_rows(shape, num_tokens, options);
    sizes.tile = shape.is_fp8() ? TileShape{rows, Fp8Tiles::kInner, Fp8Tiles::kHidden}
                                : TileShape{rows, Bf16Tiles::kInner, Bf16Tiles::kHidden};
  } else {
    sizes.tile = {kPlainTile, kPlainTile, kPlainTile};
  }
  return sizes;
}

// Pairs of CTAs compute an even number of columns, and leave an odd CTA of a rank's share out: 2
// where that loses at most 2 % of the products.
int32_t choose_cluster(const MoeSizes& sizes, const FusedOptions& options, int32_t ctas) {
  if (ctas < 2) return 1;
  if (options.cluster_size != 0) return options.cluster_size;
  const auto loss = [&](Gemm gemm) {
    const int32_t tiles = sizes.column_tiles(gemm);
    return tiles % 2 == 0 ? 0.0 : 1.0 / (tiles + 1);
  };
  const double columns = 2.0 / 3.0 * loss(Gemm::kInner) + 1.0 / 3.0 * loss(Gemm::kHidden);
  return columns + static_cast<double>(ctas % 2) / ctas <= 0.021 ? 2 : 1;
}

MoeCall moe_call(const FusedLaunch& launch) {
  MoeSizes sizes = moe_sizes(launch.shape, launch.ranks_per_device, launch.num_tokens,
                             launch.max_routes_per_rank, launch.dtype, launch.options);
  const FusedOptions& options = launch.options;
  const int32_t sms = device_sms(), ranks = launch.ranks_per_device;
  // Those who wait for READY leave an SM to the copy, whatever the budget.
  const int32_t waiting = launch.shape.slots.num_helper_slots > 0 ? sms - 1 : sms;
  const int32_t wanted = options.num_sms > 0 ? options.num_sms : sms - options.copy_sms;
  const int32_t budget = at_most(wanted, waiting);
  const int32_t most = options.num_sms > 0 ? wanted + options.copy_sms : sms;
  const int32_t ctas = at_least(budget / ranks, 1);
  if (fused_engine(launch.shape, launch.dtype, options) == MoeEngine::kTensor) {
    sizes.cluster_size = choose_cluster(sizes, options, ctas);
  }
  const auto whole = [&](int32_t count) { return count / sizes.cluster_size * sizes.cluster_size; };
  const int32_t max_ctas = whole(at_least(most / ranks, ctas));
  sizes.chunk_blocks = chunk_blocks(sizes, max_ctas / sizes.cluster_size);
  return {launch, sizes, MoeLayout(sizes), block_layout(launch.shape), whole(ctas), max_ctas};
}

bool make_maps(const MoeCall& call, MoeMaps* maps) {
  const auto encode = map_encoder();
  if (encode == nullptr) return false;
  const FusedLaunch& launch = call.launch;
  const SlotSpace& slots = call.sizes.slots;
  const uint64_t hidden = call.sizes.hidden, inner = call.sizes.intermediate;
  const uint64_t held = static_cast<uint64_t>(call.sizes.ranks_per_device) * call.sizes.wave_rows;
  const uint64_t layers = at_least(launch.num_stacked, 1);
  const uint64_t experts = layers * call.sizes.ranks_per_device * slots.num_home();
  const uint64_t bundles = uint64_t(launch.shape.num_banks) * slots.num_helper_slots;
  const bool is_fp8 = call.sizes.is_fp8();
  const int32_t bytes = is_fp8 ? 1 : 2;
  const uint32_t inner_box = is_fp8 ? Fp8Tiles::kInnerBox : Bf16Tiles::kInnerBox;
  const uint32_t hidden_box = is_fp8 ? Fp8Tiles::kHiddenBox : Bf16Tiles::kHiddenBox;
  const MoeWorkspace workspace = call.workspace();
  const auto rows_of = [&](CUtensorMap& map, uint8_t* base, uint64_t columns, uint64_t stride) {
    return encode_map(encode, {base, 0, held, columns, 0, stride, kMmaRows, bytes}, &map);
  };
  // A plane of the bundle: of `count` experts, each `stride` bytes behind the one before.
  const auto plane_of = [&](CUtensorMap& map, int which, const void* base, uint64_t count,
                            uint64_t stride) {
    const PlaneLayout& plane = call.block.bundle.planes[which];
    const uint64_t rows = plane.rows, columns = plane.columns;
    const uint32_t box = which == kDownPlane ? hidden_box : inner_box;
    return encode_map(encode, {base, count, rows, columns, stride, columns * bytes, box, bytes},
                      &map);
  };
  bool ok = rows_of(maps->rows, workspace.rows(), hidden, call.sizes.token_bytes()) &&
            rows_of(maps->inner, workspace.inner(), inner, call.sizes.inner_bytes());
  for (int which = 0; which < kNumWeightPlanes; ++which) {
    ok = ok && plane_of(maps->weights[which], which, launch.weights[which], experts,
                        call.block.bundle.planes[which].bytes);
    // Any address will do: the device puts in the bank's.
    maps->bank[which] = maps->weights[which];
    if (bundles == 0) continue;
    ok = ok &&
         plane_of(maps->bank[which], which, launch.workspace, bundles, call.block.bundle.bytes);
  }
  if (!is_fp8) return ok;
  const uint64_t scales = call.sizes.held_scales();
  return ok &&
         encode_scales(encode, workspace.row_scales(0), fp8::num_blocks(hidden), scales,
                       Fp8Tiles::kScaleBox, &maps->row_scales) &&
         encode_scales(encode, workspace.inner_scales(0), fp8::num_blocks(inner), scales,
                       Fp8Tiles::kScaleBox, &maps->inner_scales);
}

// Whether the kernels of SiLU without biases take the layer.
bool is_plain_silu(const DomainShape& shape) {
  return shape.activation.kind == ActivationKind::kSilu && !shape.has_biases;
}

template <class Tiles>
cudaError_t launch_tensor(const MoeCall& call, const MoeMaps& maps, dim3 grid,
                          cudaStream_t stream) {
  constexpr size_t kSharedBytes = kTensorSharedBytes<Tiles>;
  if (call.sizes.cluster_size == 1) {
    tensor_kernel<Tiles, 1><<<grid, kTensorThreads, kSharedBytes, stream>>>(call, maps);
    return cudaGetLastError();
  }
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = cluster.val.clusterDim.z = 1;
  cluster.val.clusterDim.y = 2;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(kTensorThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = stream;
  config.attrs = &cluster;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, tensor_kernel<Tiles, 2>, call, maps);
}

template <class Shape>
cudaError_t launch_tiles(const MoeCall& call, const MoeMaps& maps, dim3 grid, cudaStream_t stream) {
  return is_plain_silu(call.launch.shape)
             ? launch_tensor<TilesWith<Shape, Epilogue::kSilu>>(call, maps, grid, stream)
             : launch_tensor<TilesWith<Shape, Epilogue::kAny>>(call, maps, grid, stream);
}

cudaError_t launch_experts(const MoeCall& call, const MoeMaps& maps, cudaStream_t stream) {
  const dim3 grid(call.sizes.ranks_per_device, call.max_ctas_per_rank);
  if (fused_engine(call.launch.shape, call.launch.dtype, call.launch.options) ==
      MoeEngine::kTensor) {
    return call.sizes.is_fp8() ? launch_tiles<Fp8Tiles>(call, maps, grid, stream)
                               : launch_tiles<Bf16Tiles>(call, maps, grid, stream);
  }
  if (call.launch.dtype == DType::kBF16) {
    plain_kernel<__nv_bfloat16><<<grid, kPlainThreads, 0, stream>>>(call);
  } else {
    plain_kernel<float><<<grid, kPlainThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

const char* activation_error(const Activation& activation) {
  const int32_t kind = static_cast<int32_t>(activation.kind);
  if (kind < 0 || kind >= kNumActivationKinds) return "the activation is of no known kind";
  const bool is_clamped = activation.kind == ActivationKind::kClampedSwiglu;
  if (is_clamped && !(activation.limit > 0)) return "clamped SwiGLU takes a limit above 0";
  return nullptr;
}

template <typename Kernel>
cudaError_t load_kernel(Kernel kernel, size_t shared_bytes) {
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, kernel);
  if (error != cudaSuccess || shared_bytes == 0) return error;
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              static_cast<int>(shared_bytes));
}

template <class Tiles>
cudaError_t load_tensor() {
  const cudaError_t error = load_kernel(tensor_kernel<Tiles, 1>, kTensorSharedBytes<Tiles>);
  if (error != cudaSuccess) return error;
  return load_kernel(tensor_kernel<Tiles, 2>, kTensorSharedBytes<Tiles>);
}

}  // namespace

MoeEngine fused_engine(const DomainShape& shape, DType dtype, const FusedOptions& options) {
  if (options.engine != MoeEngine::kAuto) return options.engine;
  return fits_tensor(shape, dtype) ? MoeEngine::kTensor : MoeEngine::kPlain;
}

const char* fused_error(const DomainShape& shape, int32_t ranks_per_device, DType dtype,
                        const FusedOptions& options) {
  const int32_t bytes = dtype == DType::kBF16 ? 2 : 4;
  if (shape.is_fp8() && (options.engine == MoeEngine::kPlain || !fits_tensor(shape, dtype))) {
    return dtype == DType::kBF16
               ? "FP8 weights take engine=tensor and hidden and intermediate that are multiples of "
                 "64: pad them, or take weights of x's dtype"
               : "FP8 weights take engine=tensor, bf16: make x and the Domain dtype=bfloat16";
  }
  if (shape.element_bytes != bytes) return "the Domain's elements are not of this dtype";
  if (!shape.is_fp8() && element_bits_of(shape.weight_format) != 8 * bytes) {
    return "the Domain's weight_format is neither x's dtype nor float8_block128";
  }
  if (shape.hidden < 1 || shape.intermediate < 1 || shape.top_k < 1) {
    return "hidden, intermediate and top_k must be at least 1";
  }
  if (const char* why = activation_error(shape.activation)) return why;
  if (shape.hidden * int64_t{bytes} % kWordBytes != 0) {
    return "rows of x must be whole 16-byte words: pad hidden to multiples of 8 (bf16) or 4 (f32)";
  }
  if (options.engine == MoeEngine::kTensor && !fits_tensor(shape, dtype)) {
    return "engine=tensor takes bf16 with hidden and intermediate multiples of 8; take "
           "engine=plain or pad them";
  }
  if (options.tile_rows != 0 && options.tile_rows != 64 && options.tile_rows != 128 &&
      options.tile_rows != full_tile(shape)) {
    return "tile_rows must be 0 (chosen), 64, 128 or, but for FP8, 256";
  }
  if (options.cluster_size < 0 || options.cluster_size > 2) {
    return "cluster_size must be 0 (chosen), 1 or 2";
  }
  if (options.num_sms < 0 || options.num_sms > kMaxSms || options.copy_sms < 0 ||
      options.copy_sms > kMaxSms) {
    return "num_sms and copy_sms must be 0 to 1024";
  }
  if (ranks_per_device < 1 || ranks_per_device > kMaxRanks || shape.slots.num_ranks > kMaxRanks) {
    return "a Domain has at most 72 ranks";
  }
  if (shape.slots.stride() > kMaxLocalSlots) {
    return "a rank has at most 2,048 home and helper slots: use more ranks";
  }
  const int64_t routes = static_cast<int64_t>(shape.max_routes());
  if (shape.slots.num_ranks * routes > INT32_MAX / 2) {
    return "a rank may be sent more than 2^30 routes: use fewer tokens per rank";
  }
  // RankWords::routes_done counts them and is compared for equality.
  if (routes * ceil_div(shape.hidden, kUnitColumns) > int64_t{UINT32_MAX}) {
    return "a rank's max_tokens * top_k routes, times its hidden columns in 64s, reach 2^32: use "
           "fewer tokens per rank";
  }
  return nullptr;
}

cudaError_t prepare_fused() {
  if (map_encoder() == nullptr) return cudaErrorNotSupported;
  device_sms();
  const cudaError_t errors[] = {
      load_kernel(begin_kernel, 0),
      load_kernel(schedule_kernel, kMaxSharedSegments),
      load_tensor<TilesWith<Bf16Tiles, Epilogue::kSilu>>(),
      load_tensor<TilesWith<Bf16Tiles, Epilogue::kAny>>(),
      load_tensor<TilesWith<Fp8Tiles, Epilogue::kSilu>>(),
      load_tensor<TilesWith<Fp8Tiles, Epilogue::kAny>>(),
      load_kernel(plain_kernel<float>, 0),
      load_kernel(plain_kernel<__nv_bfloat16>, 0),
      load_kernel(gate_kernel, 0),
      load_kernel(combine_kernel<F32x4>, 0),
      load_kernel(combine_kernel<Bf16x8>, 0),
  };
  for (const cudaError_t error : errors) {
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

size_t fused_workspace_bytes(const DomainShape& shape, int32_t ranks_per_device, int32_t num_tokens,
                             int32_t max_routes_per_rank, DType dtype,
                             const FusedOptions& options) {
  return MoeLayout(
             moe_sizes(shape, ranks_per_device, num_tokens, max_routes_per_rank, dtype, options))
      .total;
}

cudaError_t launch_fused(const FusedLaunch& launch, cudaStream_t stream) {
  if (fused_error(launch.shape, launch.ranks_per_device, launch.dtype, launch.options) ||
      launch.num_tokens < 0 || launch.num_tokens > launch.shape.max_tokens ||
      launch.max_routes_per_rank < 1) {
    return cudaErrorInvalidValue;
  }
  const MoeCall call = moe_call(launch);
  const bool is_tensor =
      fused_engine(launch.shape, launch.dtype, launch.options) == MoeEngine::kTensor;
  MoeMaps maps{};
  if (is_tensor && !make_maps(call, &maps)) return cudaErrorInvalidValue;
  cudaError_t error =
      cudaMemsetAsync(launch.workspace, 0, call.layout.tables - call.layout.counters, stream);
  if (error != cudaSuccess) return error;

  const size_t words = launch.ranks_per_device * call.row_bytes() * launch.num_tokens / kWordBytes;
  const int32_t copy_ctas = at_most(words / (8 * kBeginThreads) + 1, 4 * device_sms());
  begin_kernel<<<copy_ctas, kBeginThreads, 0, stream>>>(call);
  const size_t segments =
      sizeof(Segment) * call.layout.limits.num_segments(call.sizes.chunk_blocks);
  const bool is_shared = segments <= kMaxSharedSegments;
  const bool has_maps = is_tensor && launch.shape.slots.num_helper_slots > 0;
  schedule_kernel<<<launch.ranks_per_device, kScheduleThreads, is_shared ? segments : 0, stream>>>(
      call, maps, has_maps, is_shared);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  error = launch_experts(call, maps, stream);
  if (error != cudaSuccess) return error;
  gate_kernel<<<1, kGateThreads, 0, stream>>>(call);
  const int32_t tokens = at_least(launch.ranks_per_device * launch.num_tokens, 1);
  const int32_t combine_ctas = at_most(tokens, 8 * device_sms());
  if (launch.dtype == DType::kBF16) {
    combine_kernel<Bf16x8><<<combine_ctas, kCombineThreads, 0, stream>>>(call);
  } else {
    combine_kernel<F32x4><<<combine_ctas, kCombineThreads, 0, stream>>>(call);
  }
  return cudaGetLastError();
}

}  // namespace iser::cuda
