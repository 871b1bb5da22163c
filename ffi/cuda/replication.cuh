// replication: whole bundles in slices to the helper slots of a group, then READY.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ffi/core/haloq.h"
#include "ffi/core/layout.h"
#include "ffi/cuda/protocol.cuh"

namespace iser::cuda {

// How a device copies. A CTA whose stages need over half of an SM's shared memory has the SM for
// itself, so `num_ctas` is a budget of SMs.
struct ReplicationOptions {
  int32_t num_ctas = 8;
  int32_t num_stages = 6;       // slices of one of a CTA's two rings, 3 to 32
  int32_t slice_bytes = 16384;  // a multiple of 128
  int32_t cluster_size = 1;     // CTAs kept side by side on one GPC; divides num_ctas, at most 8
};

struct ReplicationLaunch {
  const CallCell* cell;  // device memory; the plan is the table's
  DomainShape shape;
  ReplicationOptions options;
};

// Shared memory of a CTA.
size_t replication_shared_bytes(const DomainShape& shape, const ReplicationOptions& options);

// Null, or what the options must be.
const char* replication_options_error(const DomainShape& shape, const ReplicationOptions& options);

// Loads the kernels on the current device, so that no launch does it while another kernel waits for
// a peer.
cudaError_t prepare_replication();

// Copies what this device's ranks are to move, then arrives at READY for each of them. Waits for
// nobody: the plan, earlier in the stream, has seen every rank's counts and call tags. Once the
// Domain has failed it neither copies nor arrives.
cudaError_t launch_replication(const ReplicationLaunch& launch, cudaStream_t stream);

// Waits until every rank's copies have landed, with the Domain's limit, and compares the plans'
// hashes. What follows in the stream may read helper slots if the Domain has not failed.
cudaError_t launch_ready_gate(const CallCell* cell, cudaStream_t stream);

}  // namespace iser::cuda
