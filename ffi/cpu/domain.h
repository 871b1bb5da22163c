// A Domain on a CPU: the symmetric memory of its ranks and the threads that serve them.
//
// Each device of this process has two threads: COPY plans and copies, MAIN computes and completes
// calls. Calls only enqueue, so that no thread of XLA ever waits for a peer. Invocations run one
// after the other on each device; `generation` counts them alike on all ranks.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "ffi/core/haloq.h"
#include "ffi/core/layout.h"
#include "ffi/cpu/gemm.h"
#include "ffi/cpu/sync.h"

namespace iser::cpu {

struct DomainOptions {
  DomainShape shape;
  DType dtype;
  int32_t min_group_size;
  int32_t min_routes;
  int32_t gain_threshold;
  CopyRule copy_rule;
  bool resident;  // keep replicas between calls; needs a bank per layer
  int32_t num_layers;
  int32_t ranks_per_device;
  int64_t max_routes_per_rank;
  int64_t timeout_ns;
  int64_t startup_timeout_ns;     // for the first invocation
  bool poison;                    // fill token and combine buffers with NaN before each use
  uint64_t sizes = 0;             // digest of the configuration; programs are compiled for one
  uint32_t first_generation = 1;  // tests begin shortly before generations wrap around

  PlanConfig plan_config() const {
    return {shape.slots, min_group_size, min_routes, gain_threshold, copy_rule};
  }
};

// A process's part of the symmetric memory, mapped here.
struct Segment {
  uint8_t* base;
  int32_t first_rank;
  int32_t num_ranks;
  int alive_fd;  // a socket to that process, -1 for this one
};

// Memory that a process's `place` put weights in, mapped in every process.
struct PlacedMemory {
  int32_t first_rank;   // of the process that owns it
  uint64_t owner_base;  // its address there
  uint64_t bytes;
  const uint8_t* base;  // its address here; the Domain unmaps it
};

// One device's call. Pointers stay valid until fused_moe has completed on the device.
struct StartCall {
  int32_t layer;
  int32_t weights_version;
  bool is_balanced;
  bool is_plan_only;
  int32_t num_tokens;                  // of one rank
  const int32_t* topk_ids;             // [V*num_tokens, top_k]
  const uint8_t* weights[kMaxPlanes];  // of the device's first expert in this layer
};

struct PlanOutputs {
  int32_t* route_slot;  // [V*num_tokens, top_k]
  int32_t* broadcasts;
  int32_t* quota;
  int32_t* num_broadcasts;
  int32_t* load_before;
  int32_t* load;
  int32_t* status;
  uint32_t* generation;
};

// Called once, from a thread of the device, with an empty text on success.
using Done = std::function<void(const std::string& error)>;

struct FusedCall {
  const uint8_t* x;           // [V*num_tokens, hidden]
  const float* topk_weights;  // [V*num_tokens, top_k]
  uint8_t* y;
  PlanOutputs plan;
  Done done;
};

// The plan of one generation, shared by this process's ranks.
struct SharedPlan {
  uint32_t generation = 0;
  std::vector<int32_t> counts;  // [P, E]
  std::vector<Broadcast> broadcasts;
  std::vector<int32_t> quota, load_before, load;
  int32_t num_broadcasts = 0, target = 0;
  uint64_t hash = 0;

  PlanView view() {
    return {broadcasts.data(), quota.data(),    load_before.data(),
            load.data(),       &num_broadcasts, &target};
  }
};

// Moments of one invocation on one device, CLOCK_MONOTONIC nanoseconds.
struct Timeline {
  uint32_t generation;
  int32_t layer;
  int64_t started, planned, copy_begin, copy_end, fused_called, ready_seen, finished;
};

// The first rank that has not arrived at a stage, -1 if there is none.
struct Missing {
  Stage stage;
  int32_t rank;
};

struct Invocation {
  uint32_t generation;
  bool is_first;  // of the Domain: its waits have a limit of their own
  StartCall call;
  std::vector<int32_t> topk_ids;    // [V*num_tokens, top_k], ours: XLA may reuse the operand
  std::vector<int32_t> route_slot;  // likewise
  std::shared_ptr<SharedPlan> plan;
  uint32_t is_planned = 0;  // a word to sleep on
  PlanOutputs plan_only_outputs{};
  Done plan_only_done;
  Timeline times{};
};

class Domain;

// A call of a program: one execution of it, and where in the program the call stands. Calls that do
// not depend on each other come in another order on each device; this tells them apart.
struct CallKey {
  int64_t run_id;
  uint64_t site;
  bool operator<(const CallKey& other) const {
    return std::tie(run_id, site) < std::tie(other.run_id, other.site);
  }
};

// One device of this process and its V ranks.
class Device {
 public:
  Device(Domain& domain, int32_t first_rank);
  ~Device();

  // Both return at once. `start` gives the invocation's generation.
  uint32_t start(const CallKey& key, const StartCall& call, const PlanOutputs& plan_only_outputs,
                 Done plan_only_done);
  void fused_moe(uint32_t generation, FusedCall call);
  // The invocation that `start` began, or null: for validation.
  std::shared_ptr<Invocation> find(uint32_t generation);
  // The oldest invocation that has not completed, or null.
  std::shared_ptr<Invocation> oldest();

  const int32_t first_rank;

 private:
  struct MainJob {
    std::shared_ptr<Invocation> invocation;
    FusedCall call;
  };

  void copy_loop();
  void main_loop();
  bool wait_turn(const Invocation& invocation);
  bool is_turn(const Invocation& invocation) const;
  void run_copy(Invocation& invocation);
  void run_main(MainJob& job);
  void finish(const std::shared_ptr<Invocation>& invocation);

  Domain& domain_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool closing_ = false, copy_ended_ = false;
  uint32_t last_finished_;
  template <typename T>
  using ByGeneration = std::map<uint32_t, T, EarlierGeneration>;
  ByGeneration<std::shared_ptr<Invocation>> copy_queue_, in_flight_;
  ByGeneration<MainJob> main_queue_;
  std::thread copy_thread_, main_thread_;
};

class Domain {
 public:
  Domain(DomainOptions options, std::vector<Segment> segments, int32_t local_segment);
  ~Domain();

  const DomainOptions options;
  const DomainShape& shape() const { return options.shape; }
  const BundleLayout& bundle() const { return layout.bundle; }
  const BlockLayout layout;

  Device* device_of(int32_t first_rank);
  int32_t num_local_ranks() const { return local().num_ranks; }
  int32_t first_local_rank() const { return local().first_rank; }
  bool is_multi_process() const { return segments_.size() > 1; }
  bool is_local(int32_t rank) const;
  BlockView block(int32_t rank) const { return blocks_[rank]; }
  int32_t bank_of(int32_t layer) const { return layer % options.shape.num_banks; }

  // Counts this process's invocations, from 0: the same for the i-th start of one call (in a loop)
  // on every device, whatever order the devices come in.
  uint64_t serial_of(const CallKey& key, int32_t device_rank);

  // Stages. `wait` returns false once the Domain has failed; it fails the Domain at its limit.
  void arrive(Stage stage, int32_t rank, uint32_t generation);
  bool wait(Stage stage, int32_t rank, const Invocation& invocation);
  bool wait_combined(int32_t rank, const Invocation& invocation);
  bool wait_planned(Invocation& invocation);

  bool has_failed() const { return load_acquire(&local_words()->aborted) != 0; }
  // Brackets around reading operands of calls, which are freed once their calls have completed; not
  // entered, and false, when the Domain has failed. A failed call completes after the last reader.
  bool begin_reading();
  void end_reading() { num_reading_.fetch_sub(1, std::memory_order_release); }
  void wait_readers() const;
  void fail(const ErrorWord& error);
  // Fails the calls in flight because this process closes the Domain.
  void fail_closed();
  // Tells the other processes that no calls of this one come any more.
  void leave();
  ErrorWord error() const;
  std::string error_text() const;
  void check_guards();

  // The plan of the invocation; the first rank of this process to ask computes it.
  std::shared_ptr<SharedPlan> plan_for(const Invocation& invocation, int32_t rank);
  // Where this process can read an expert's planes at home; false when it must be staged.
  bool home_planes(int32_t owner, int32_t expert, uint32_t generation,
                   const uint8_t* planes[kMaxPlanes]) const;
  // Whether other processes can read the rank's home experts in place.
  bool is_placed(int32_t rank, uint32_t generation) const;
  void add_placed(const PlacedMemory& memory);

  // For fault tests: the rank's next arrival at the stage comes this much later.
  void stall(int32_t rank, Stage stage, int64_t ns);

  // Nanoseconds of thread CPU time in expert tiles, and rows computed: [num_layers, local ranks].
  std::vector<std::atomic<int64_t>> busy_ns, tile_rows;
  void charge(int32_t layer, int32_t rank, int64_t ns, int64_t rows);
  void record(const Timeline& times, int32_t device_rank);
  std::vector<std::pair<int32_t, Timeline>> timelines();

  bool wait_idle(int64_t limit_ns);

  // A forked child has the Domain's memory, which it shares with its parent, but no threads.
  const pid_t owner_process = getpid();

 private:
  friend class Device;
  const Segment& local() const { return segments_[local_segment_]; }
  ProcessWords* words_of(const Segment& segment) const {
    return reinterpret_cast<ProcessWords*>(segment.base);
  }
  ProcessWords* local_words() const { return words_of(local()); }
  bool is_idle();
  bool keep_waiting(const Missing& missing, int32_t rank, const Invocation& invocation,
                    int64_t deadline);
  int64_t limit_for(const Invocation& invocation) const;
  int64_t deadline_for(const Invocation& invocation) const;
  Missing find_missing(Stage stage, uint32_t generation) const;
  bool never_comes(const Missing& missing, uint32_t generation) const;
  const PlacedMemory* find_placed(int32_t rank, uint64_t address) const;
  const Segment& segment_of(int32_t rank) const;
  bool compute_plan(const Invocation& invocation, int32_t rank, SharedPlan& plan);
  bool tags_agree(const Invocation& invocation, int32_t rank);
  void update_slot_table(const Invocation& invocation, const SharedPlan& plan);
  void wake_everyone();

  const std::vector<Segment> segments_;
  const int32_t local_segment_;
  std::vector<BlockView> blocks_;  // of all ranks

  std::mutex order_mutex_;
  uint64_t num_invocations_ = 0;
  struct Run {
    std::map<int32_t, size_t> started;  // by device: how many starts it has seen
    std::vector<uint64_t> serials;      // by start
  };
  std::map<CallKey, Run> runs_;

  std::mutex plan_mutex_;
  std::shared_ptr<SharedPlan> plan_;
  std::vector<int64_t> plan_scratch_;
  struct SlotTable {
    int32_t weights_version = 0;
    std::vector<int32_t> expert;  // [P, S], -1 for none
  };
  std::vector<SlotTable> slot_tables_;  // by bank
  mutable std::mutex placed_mutex_;
  std::deque<PlacedMemory> placed_;
  std::vector<std::atomic<int64_t>> stalls_;  // [local ranks, stages]
  std::atomic<int> num_reading_{0};

  std::mutex record_mutex_;
  std::deque<std::pair<int32_t, Timeline>> timelines_;

  std::map<int32_t, std::unique_ptr<Device>> devices_;  // by first rank; last: joined first
};

// The ops, one file each.

// plan.cc: histograms and publishes, derives the plan, rewrites routes, builds the send lists.
void publish_counts(Domain& domain, const Invocation& invocation, int32_t rank, int32_t local_idx);
void rewrite_routes(Domain& domain, Invocation& invocation, int32_t rank, int32_t local_idx);

// replication.cc: copies the bundles that `rank` is to move, then says so.
bool stage_bundles(Domain& domain, const Invocation& invocation, int32_t rank);
bool replicate(Domain& domain, const Invocation& invocation, int32_t rank);
void publish_ready(Domain& domain, const Invocation& invocation, int32_t rank);

// fused_moe.cc: expert tiles and combine of the device's ranks.
bool fused_moe(Domain& domain, Invocation& invocation, const FusedCall& call, int32_t first_rank);
void write_plan_outputs(Domain& domain, const Invocation& invocation, const PlanOutputs& outputs,
                        bool ok);

}  // namespace iser::cpu
