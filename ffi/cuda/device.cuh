// What a process keeps on the host for its GPUs: handlers of XLA find it by device ordinal and by
// the digest of a program's configuration, and allocate nothing.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "ffi/cuda/fused_moe.cuh"
#include "ffi/cuda/plan.cuh"
#include "ffi/cuda/protocol.cuh"
#include "ffi/cuda/replication.cuh"

namespace iser::cuda {

// Configuration of a Domain as its kernels need it.
struct DomainSetup {
  PlanConfig plan;
  DomainShape shape;
  int32_t ranks_per_device;
  int32_t num_layers;
  DType dtype;
  int32_t is_resident;
  int64_t max_routes_per_rank;
  uint64_t timeout_ns;
  uint64_t startup_timeout_ns;
  int32_t poison;
  int32_t plan_ctas_per_rank;  // at most
  ReplicationOptions replication;
  FusedOptions fused;
  PlanGrid grid;                  // chosen by `add_setup`
  uint32_t first_generation = 1;  // tests begin shortly before generations wrap around
};

// One GPU for as long as the process lives. Calls in flight have a cell each.
struct DeviceRuntime {
  static constexpr int kNumCells = 64;

  std::mutex mutex;  // held while a handler enqueues
  int ordinal;
  cudaStream_t copy;   // the highest priority: plans and copies
  cudaStream_t admin;  // reads and writes of the host, which must not wait for kernels that spin
  Directory* directory;
  CallCell* cells;
  cudaEvent_t started, planned[kNumCells], copied[kNumCells];
  cudaEvent_t left;  // by MAIN, after the last call that was enqueued
  uint32_t num_calls = 0;

  // Calls whose fused_moe has yet to come, oldest first, by the address of their ticket.
  struct Started {
    const void* ticket;
    uint32_t cell;
  };
  std::vector<Started> in_flight;

  void* cublas = nullptr;  // for shared_expert; made when it is first asked for
};

// Makes what the device keeps, once, and loads every kernel on it, so that no launch has to while
// another kernel waits for a peer. Throws std::runtime_error.
DeviceRuntime& open_device(int ordinal, uint32_t process_mark);
// Null before open_device.
DeviceRuntime* find_device(int ordinal);

// Opens cuBLAS (see shared_expert.cuh) and gives the device a handle. Throws std::runtime_error.
void open_cublas(DeviceRuntime& runtime, const std::string& path);

// Throws std::invalid_argument where the kernels of copies and experts do not take the sizes.
void check_sizes(const DomainSetup& setup);

// Remembers what programs compiled for the digest are launched with; throws std::invalid_argument
// where the plan kernel does not take the sizes.
void add_setup(DeviceRuntime& runtime, uint64_t sizes, DomainSetup setup);
// Null where no Domain of these sizes has been made in this process.
const DomainSetup* find_setup(uint64_t sizes);

// Memory of one device: head and mail, the blocks of its ranks, then what only it uses.
size_t device_bytes(const DomainSetup& setup);

// Scratch of one fused_moe with so many tokens a rank.
size_t workspace_bytes(const DomainSetup& setup, int32_t num_tokens);

// A device's part of a Domain. `segments` are the addresses here of all devices' memory, in rank
// order; this device's has been zeroed.
struct DomainPart {
  uint32_t id;
  uint64_t sizes;
  int32_t device;  // index among the Domain's
  std::vector<uint64_t> segments;
};

// Writes tables and guard words; programs can name the Domain from `publish_part` on.
void write_part(DeviceRuntime& runtime, const DomainSetup& setup, const DomainPart& part);
void publish_part(DeviceRuntime& runtime, const DomainSetup& setup, const DomainPart& part);
// False, and nothing done, while calls are in flight: their threads look the entry up each for
// itself, and must all find the same.
bool remove_part(DeviceRuntime& runtime, uint32_t id);

// Whether MAIN and COPY have run all that handlers have enqueued.
bool is_idle(DeviceRuntime& runtime);

// By the admin stream, while kernels may spin.
void read_memory(DeviceRuntime& runtime, uint64_t address, void* to, size_t bytes);
void write_memory(DeviceRuntime& runtime, uint64_t address, const void* from, size_t bytes);
// Calls since the last read that named no open Domain of their sizes.
uint32_t take_misuse(DeviceRuntime& runtime);

// Where things lie in a device's memory.
uint64_t head_address(uint64_t segment);
uint64_t block_address(const DomainSetup& setup, uint64_t segment, int32_t local_idx);
uint64_t times_address(const DomainSetup& setup, uint64_t segment);
uint64_t stall_address(const DomainSetup& setup, uint64_t segment, int32_t local_idx, Stage stage);

// Makes a GPU current for the calls of this thread; the one that was comes back.
class OnDevice {
 public:
  explicit OnDevice(int ordinal);
  ~OnDevice();
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int wanted_, before_;
  cudaError_t error_;
};

// "what failed: name of the error", empty where it did not.
std::string cuda_text(cudaError_t error, const char* what);
// The same, thrown.
void check_cuda(cudaError_t error, const char* what);

}  // namespace iser::cuda
