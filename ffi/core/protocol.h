// The words that ranks exchange, and what goes wrong in them. Plain integers: CPU code reads and
// writes them with __atomic built-ins, device code with system-scope loads and stores.
#pragma once

#include <cstdint>

#include "ffi/core/expert.h"
#include "ffi/core/limits.h"

namespace iser {

// All-to-all stages of one invocation, in order. Each rank arrives once a generation at each.
enum class Stage : int32_t {
  kCounts = 0,    // route counts and weight addresses are readable
  kStaged = 1,    // exported bundles are readable by other processes
  kDispatch = 2,  // tokens and send lists are readable
  kReady = 3,     // this rank's copies have landed
  kCombine = 4,   // routes of this rank are computed (not all-to-all: one counter a rank)
  kNumStages = 5,
};

inline const char* stage_name(Stage stage) {
  constexpr const char* kNames[] = {"counts", "staging", "dispatch", "READY", "combine"};
  return kNames[static_cast<int32_t>(stage)];
}

enum class ErrorCode : int32_t {
  kNone = 0,
  kTimeout = 1,       // a peer did not arrive within the limit
  kPeerDied = 2,      // a peer's process is gone
  kCallMismatch = 3,  // ranks are in different calls
  kPlanMismatch = 4,  // ranks derived different plans
  kClosed = 5,        // the Domain was closed while a call was in flight
  kCorrupt = 6,       // a guard word was overwritten
  kBadFusedMoe = 7,   // a fused_moe does not fit the start it completes
  kBadHandle = 8,     // a program's operand names no open Domain of its sizes
  kBadLayer = 9,      // a layer operand is outside the Domain's layers
  kOverlap = 10,      // a call began before the one before it had ended
};

struct ErrorWord {
  int32_t code;  // ErrorCode
  int32_t rank;  // who noticed
  int32_t peer;  // who is missing or differs, -1 if unknown
  int32_t layer;
  int32_t stage;
  uint32_t generation;
  uint64_t expected;  // of a timeout: the limit in ms
  uint64_t found;     // of a timeout: 1 where it was the limit of the first call
};

// What a rank says of its call beside its counts; peers compare it with their own.
struct CallTag {
  uint32_t generation;
  int32_t layer;
  int32_t num_tokens;  // of one rank
  int32_t is_balanced;
  int32_t is_plan_only;
  int32_t weights_version;
  uint64_t weights[kMaxPlanes];  // of the rank's first home expert, addresses in its own process
};

// Head of a process's segment. Arrival counters only grow: stage s of generation g is complete on
// every rank once arrivals[s] reaches g * num_ranks (modulo 2^32).
struct alignas(64) ProcessWords {
  uint32_t arrivals[static_cast<int32_t>(Stage::kNumStages)];
  uint32_t aborted;
  uint32_t is_leaving;  // this process closes the Domain: it makes no more calls
  ErrorWord error;
};

struct alignas(64) RankWords {
  uint32_t arrived[static_cast<int32_t>(Stage::kNumStages)];  // last generation, for diagnosis
  uint32_t routes_done;  // low 32 bits of the routes of this source computed in this generation
  uint32_t routes_expected;
  uint64_t plan_hash;
  CallTag tags[2];  // by generation parity
};

// Whether generation (or counter) `seen` has reached `wanted`. Both wrap around at 2^32, so that
// nothing may order them by value.
ISER_HD inline bool has_reached(uint32_t seen, uint32_t wanted) {
  return static_cast<int32_t>(seen - wanted) >= 0;
}

// Orders generations that are in flight together, which lie far less than 2^31 apart.
struct EarlierGeneration {
  bool operator()(uint32_t a, uint32_t b) const { return !has_reached(a, b); }
};

}  // namespace iser
