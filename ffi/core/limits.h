// The largest sizes that every part takes. jax_iser/limits.py has the same table for builds without
// the extension; a test compares the two.
#pragma once

#include <cstdint>

namespace iser {

constexpr int32_t kMaxRanks = 72;         // of an expert-parallel group
constexpr int32_t kMaxExperts = 1024;     // of a layer
constexpr int32_t kMaxHelperSlots = 16;   // of a rank
constexpr int32_t kMaxLayers = 1 << 16;   // of a Domain
constexpr int32_t kMaxLocalSlots = 2048;  // home and helper slots of a rank
constexpr int32_t kMaxPlanes = 6;         // of a bundle: gate, up, down and their biases

}  // namespace iser
