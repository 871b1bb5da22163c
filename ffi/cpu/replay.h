// Replays count matrices through HALO-Q and keeps only what a table of figures needs of each plan.
#pragma once

#include <cstdint>

#include "ffi/core/haloq.h"

namespace iser::cpu {

// Columns of ReplayBatch::figures; jax_iser.replay names them in this order.
enum ReplayFigure : int32_t {
  kLoadBeforeMax,
  kLoadSum,
  kSendOff,  // most routes that a rank sends out when every expert runs at home
  kRecvOff,  // most routes that a rank takes in then
  kLoadMax,
  kSend,
  kRecv,
  kRemoteCopies,  // experts received by ranks that do not own them
  kOwnerCopies,   // most broadcasts of one owner
  kBroadcasts,
  kWithoutOwner,  // broadcasts whose group excludes the owner
  kSlotsUsed,     // over all ranks
  kSlotsUsedMax,
  kReplicasStayed,  // replicas that the same rank held in the iteration before
  kNumReplayFigures,
};

// `counts` holds one [num_layers, P, E] per iteration. `slots` is [num_iterations + 1, num_layers,
// P, S]: its first block is given (-1 for none), the others are written. `figures` is
// [num_iterations, num_layers, kNumReplayFigures].
struct ReplayBatch {
  PlanConfig config;
  int64_t num_iterations;
  int64_t num_layers;
  const int32_t* const* counts;
  int32_t* slots;
  int32_t* figures;
};

// Runs on the calling thread.
void run_replay_batch(const ReplayBatch& batch);

}  // namespace iser::cpu
