// Tensor maps: how TMA sees the workspace, the weights and the helper banks.
//
// Maps of memory that the host knows are kernel parameters. Where the Domain's helper banks lie is
// known on the device alone: their maps are made on the host without an address, which the device
// puts in.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <cstdint>

#include "ffi/cuda/moe_schedule.cuh"

namespace iser::cuda {

struct MoeMaps {
  CUtensorMap rows, inner;  // [V * wave_rows, D or I], boxes of 64 rows
  // Gate, up, down: [experts of all layers, I or D, D or I], and the same of a rank's helper banks,
  // whose experts are as far apart as bundles are.
  CUtensorMap weights[kNumWeightPlanes];
  CUtensorMap bank[kNumWeightPlanes];
  // FP8 alone: [blocks of 128 columns, held rows], boxes of a tile's rows and four more.
  CUtensorMap row_scales, inner_scales;
};

// [planes, rows, columns] of elements whose type has so many bytes; boxes of box_rows rows and 128
// swizzled bytes, zero where they stick out of the rows and columns. Strides in bytes, of whole
// 16-byte words.
struct MapShape {
  const void* base;
  uint64_t planes, rows, columns;
  uint64_t plane_stride, row_stride;
  uint32_t box_rows;
  int32_t element_bytes;  // 2: bf16; 1: e4m3
};

inline bool encode_map(PFN_cuTensorMapEncodeTiled_v12000 encode, const MapShape& shape,
                       CUtensorMap* map) {
  const cuuint64_t sizes[3] = {shape.columns, shape.rows, shape.planes};
  const cuuint64_t strides[2] = {shape.row_stride, shape.plane_stride};
  const cuuint32_t box[3] = {128u / shape.element_bytes, shape.box_rows, 1}, steps[3] = {1, 1, 1};
  const CUtensorMapDataType type =
      shape.element_bytes == 2 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
  return encode(map, type, shape.planes == 0 ? 2 : 3, const_cast<void*>(shape.base), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// f32 [blocks, held]; a box is `box_rows` neighbours of one block.
inline bool encode_scales(PFN_cuTensorMapEncodeTiled_v12000 encode, const float* base,
                          uint64_t blocks, uint64_t held, uint32_t box_rows, CUtensorMap* map) {
  const cuuint64_t sizes[2] = {held, blocks}, strides[1] = {held * sizeof(float)};
  const cuuint32_t box[2] = {box_rows, 1}, steps[2] = {1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 2, const_cast<float*>(base), sizes, strides,
                box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE,
                CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace iser::cuda
