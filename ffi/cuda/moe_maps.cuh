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
  CUtensorMap rows, inner;     // [V * wave_rows, D or I], boxes of 64 rows
  CUtensorMap gate, up, down;  // [experts of all layers, I or D, D or I]
  CUtensorMap bank[2];         // helper banks of a rank as planes of [I, D] and of [D, I]
};

enum BankMap : int32_t { kBankInner = 0, kBankHidden = 1 };

// [planes, rows, columns] in bf16, contiguous; boxes of `box_rows` rows and 128 swizzled bytes.
struct MapShape {
  const void* base;
  uint64_t planes, rows, columns;
  uint32_t box_rows;
  bool is_flat;  // [rows, columns]
};

inline bool encode_map(PFN_cuTensorMapEncodeTiled_v12000 encode, const MapShape& shape,
                       CUtensorMap* map) {
  const cuuint64_t sizes[3] = {shape.columns, shape.rows, shape.planes};
  const cuuint64_t strides[2] = {shape.columns * 2, shape.rows * shape.columns * 2};
  const cuuint32_t box[3] = {64, shape.box_rows, 1}, steps[3] = {1, 1, 1};
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, shape.is_flat ? 2 : 3,
                const_cast<void*>(shape.base), sizes, strides, box, steps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace iser::cuda
