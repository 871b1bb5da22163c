// The ops whose kernels do not run here.
#include "ffi/cuda/plan.cuh"
#include "ffi/cuda/replication.cuh"

namespace iser::cuda {

cudaError_t prepare_replication() { return cudaSuccess; }
cudaError_t launch_replication(const ReplicationLaunch&, cudaStream_t) { std::abort(); }
cudaError_t prepare_plan(const PlanConfig&, int32_t, int64_t, int32_t, PlanGrid*) { std::abort(); }
cudaError_t launch_plan(const PlanGrid&, const PlanLaunch&, cudaStream_t) { std::abort(); }

}  // namespace iser::cuda
