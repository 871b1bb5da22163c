// Tensor maps, with what ptx.h reads of them in their bytes.
#pragma once

#include "cuda_runtime.h"

struct alignas(64) CUtensorMap {
  uint8_t bytes[128];
};
using cuuint64_t = uint64_t;
using cuuint32_t = uint32_t;
enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType {
  CU_TENSOR_MAP_DATA_TYPE_UINT8,
  CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
  CU_TENSOR_MAP_DATA_TYPE_FLOAT32
};
enum { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum {
  CU_TENSOR_MAP_INTERLEAVE_NONE,
  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
  CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
};
using PFN_cuTensorMapEncodeTiled_v12000 = CUresult (*)(CUtensorMap*, CUtensorMapDataType,
                                                       cuuint32_t, void*, const cuuint64_t*,
                                                       const cuuint64_t*, const cuuint32_t*,
                                                       const cuuint32_t*, int, int, int, int);

inline CUresult fake_encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base,
                            const cuuint64_t* sizes, const cuuint64_t* strides,
                            const cuuint32_t* box, const cuuint32_t*, int, int swizzle, int, int) {
  simt::TensorMap made{};
  made.base = static_cast<uint8_t*>(base);
  made.rank = rank;
  made.is_swizzled = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  const int bytes = 1 << type;
  const uint64_t box_bytes = static_cast<uint64_t>(box[0]) * bytes;
  bool ok = reinterpret_cast<uintptr_t>(base) % 16 == 0 && box_bytes % 16 == 0 &&
            (!made.is_swizzled || box_bytes <= 128);
  for (cuuint32_t i = 0; i < rank; ++i) {
    made.size[i] = sizes[i];
    made.box[i] = box[i];
    made.stride[i] = i == 0 ? bytes : strides[i - 1];
    ok = ok && sizes[i] > 0 && box[i] > 0 && box[i] <= 256 && (i == 0 || made.stride[i] % 16 == 0);
  }
  static_assert(sizeof(made) <= sizeof(CUtensorMap));
  std::memcpy(map->bytes, &made, sizeof made);
  return ok ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

inline void* fake_map_encoder() { return reinterpret_cast<void*>(&fake_encode); }
