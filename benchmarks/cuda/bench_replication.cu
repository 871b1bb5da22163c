// Copies between two GPUs: the replication kernel by CTAs, ring and rule, against cudaMemcpyPeer,
// the best copy by loads and stores, and ncclBroadcast of the same run; then beside a stream of
// GEMMs. Prints a JSON object a line. Every copy is checked before it is timed.
//
//   bench_replication [--gpus N] [tune] [sizes] [beside]    (all by default; skips below two GPUs)
//
// `gbps` is bundle bytes over time. "copy" times the owner's kernel alone, back to back; "op" the
// kernel and the READY gate on both GPUs, as ncclBroadcast is timed: calls back to back in a
// stream.
#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>

#include "plain_copy.cuh"
#include "tests/cuda/replication_world.cuh"
#include "vendor.h"

using namespace iser;
using namespace iser::cuda;

namespace {

constexpr int kCalls = 10, kRepeats = 9;
constexpr int kAlone = 31;  // repeats of single calls
constexpr uint64_t kTimeoutNs = 5'000'000'000;
constexpr size_t kMiB = 1 << 20;

double quantile(std::vector<double> values, double q) {
  const auto at = values.begin() + static_cast<size_t>(q * (values.size() - 1));
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

double median(const std::vector<double>& values) { return quantile(values, 0.5); }

struct RingShape {
  int slice_bytes, num_stages;
};

__global__ void count_different(const uint4* a, const uint4* b, size_t count, uint32_t* result) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint4 x = a[i], y = b[i];
    if (x.x != y.x || x.y != y.y || x.z != y.z || x.w != y.w) atomicAdd(result, 1u);
  }
}

// Planes are multiples of 128 bytes, as those of models are: at other sizes slices straddle the
// lines of memory and copy at two thirds of the rate.
DomainShape shape_of(size_t bundle_bytes, int num_bundles) {
  const int intermediate = static_cast<int>(bundle_bytes / 384 * 8);
  return make_shape({2, 2 * num_bundles, num_bundles}, 1, 8, intermediate, 1, 2, 1);
}

// Two ranks, a GPU each; rank 0 exports `num_bundles` experts to rank 1.
class Pair {
 public:
  Pair(size_t bundle_bytes, int num_bundles)
      : bundle_bytes(bundle_bytes / 384 * 384),
        num_bundles(num_bundles),
        world(shape_of(bundle_bytes, num_bundles), 2, 2, kTimeoutNs) {
    std::vector<uint32_t> numbers(kMaxCalls);
    std::iota(numbers.begin(), numbers.end(), 1);
    for (int d = 0; d < 2; ++d) {
      CHECK_CUDA(cudaSetDevice(d));
      CHECK_CUDA(cudaMalloc(&generations_[d], kMaxCalls * sizeof(uint32_t)));
      World::set(generations_[d], numbers.data(), numbers.size());
      make_cells(d);
      for (cudaEvent_t& event : events_[d]) CHECK_CUDA(cudaEventCreate(&event));
    }
    CHECK_CUDA(cudaMalloc(&num_different_, sizeof(uint32_t)));
    fill();
  }
  ~Pair() {
    for (int d = 0; d < 2; ++d) {
      CHECK_CUDA(cudaFree(generations_[d]));
      CHECK_CUDA(cudaFree(tables_[d]));
      CHECK_CUDA(cudaFree(cells_[d]));
    }
    CHECK_CUDA(cudaFree(num_different_));
  }

  const size_t bundle_bytes;
  const int num_bundles;
  World world;

  size_t bytes() const { return bundle_bytes * num_bundles; }
  uint8_t* source() const { return world.weights(0, 0); }
  uint8_t* target() const { return world.block(1).helper(world.shape, 0, 0); }

  void set_rule(CopyWay how) {
    std::vector<Broadcast> rows;
    for (int b = 0; b < num_bundles; ++b)
      rows.push_back({b, 0, 0, 0, b, static_cast<int32_t>(how)});
    for (uint32_t parity : {0u, 1u}) world.set_plan(parity, 0, rows, 1);
    rewind();
  }

  // Call `index` counted from the last rewind.
  void replicate(int device, const ReplicationOptions& options, int index) const {
    world.replicate(device, options, cells_[device] + index);
  }
  void gate(int device, int index) const { world.gate(device, cells_[device] + index); }

  // Arrivals start again from nothing.
  void rewind() const {
    world.synchronize();
    for (int d = 0; d < 2; ++d) {
      CHECK_CUDA(cudaSetDevice(d));
      CHECK_CUDA(cudaMemset(&world.head(d)->words, 0, sizeof(ProcessWords)));
      CHECK_CUDA(cudaDeviceSynchronize());
    }
  }

  // Runs one copy into poisoned memory and compares; exits where a byte differs.
  void check(const char* what, const std::function<void(int device, int index)>& call) const {
    rewind();
    CHECK_CUDA(cudaSetDevice(1));
    CHECK_CUDA(cudaMemset(target(), 0xCD, bytes()));
    CHECK_CUDA(cudaMemset(num_different_, 0, sizeof(uint32_t)));
    CHECK_CUDA(cudaDeviceSynchronize());
    for (int d = 0; d < 2; ++d) call(d, 0);
    world.synchronize();
    CHECK_CUDA(cudaSetDevice(1));
    const size_t plane = world.layout.bundle.planes[kGatePlane].bytes;
    for (int i = 0; i < 3 * num_bundles; ++i) {
      const uint8_t* source = world.weights(0, i % 3) + i / 3 * plane;
      count_different<<<256, 256>>>(reinterpret_cast<const uint4*>(source),
                                    reinterpret_cast<const uint4*>(target() + i * plane),
                                    plane / sizeof(uint4), num_different_);
    }
    const uint32_t found = World::get(num_different_);
    if (found == 0) return;
    std::fprintf(stderr, "%s: %u words of 16 bytes arrived damaged\n", what, found);
    std::exit(3);
  }

  void expect_no_failure() const {
    for (int d = 0; d < 2; ++d) {
      const ProcessWords words = World::get(&world.head(d)->words);
      if (words.aborted == 0) continue;
      std::fprintf(stderr, "device %d failed with code %d\n", d, words.error.code);
      std::exit(3);
    }
  }

  // Microseconds a call: `calls` of them queued on the devices that take part, the slower device.
  double time(int first, int last, const std::function<void(int device, int index)>& call,
              int calls = kCalls, int repeats = kRepeats) const {
    std::vector<double> times;
    for (int repeat = 0; repeat <= repeats; ++repeat) {
      rewind();
      for (int d = first; d <= last; ++d) record(d, 0);
      for (int i = 0; i < calls; ++i) {
        for (int d = first; d <= last; ++d) call(d, i);
      }
      for (int d = first; d <= last; ++d) record(d, 1);
      world.synchronize();
      expect_no_failure();
      double slowest = 0;
      for (int d = first; d <= last; ++d) slowest = std::max(slowest, elapsed_us(d));
      if (repeat > 0) times.push_back(slowest / calls);
    }
    return median(times);
  }

 private:
  static constexpr int kMaxCalls = 256;

  // A call each: calls in flight differ in their generation alone.
  void make_cells(int device) {
    CHECK_CUDA(cudaMalloc(&tables_[device], kMaxCalls * sizeof(DeviceTable)));
    CHECK_CUDA(cudaMalloc(&cells_[device], kMaxCalls * sizeof(CallCell)));
    for (int i = 0; i < kMaxCalls; ++i) {
      const DeviceTable table = world.table_with(device, generations_[device] + i);
      const CallCell cell{tables_[device] + i, {}};
      World::set(tables_[device] + i, &table, 1);
      World::set(cells_[device] + i, &cell, 1);
    }
  }
  void record(int device, int which) const {
    CHECK_CUDA(cudaSetDevice(device));
    CHECK_CUDA(cudaEventRecord(events_[device][which], world.stream(device)));
  }
  double elapsed_us(int device) const {
    float ms = 0;
    CHECK_CUDA(cudaEventElapsedTime(&ms, events_[device][0], events_[device][1]));
    return 1000.0 * ms;
  }
  void fill() const {
    std::mt19937_64 random(1);
    std::vector<uint64_t> words(world.layout.bundle.planes[kGatePlane].bytes / 8);
    for (uint64_t& word : words) word = random();
    for (int i = 0; i < 3 * num_bundles; ++i) {
      words[i % words.size()] = i;  // planes differ, so that a mix-up shows
      const int bundle = i / 3, plane = i % 3;
      World::set(world.weights(0, plane) + bundle * world.layout.bundle.planes[kGatePlane].bytes,
                 words.data(), words.size());
    }
  }

  uint32_t* generations_[2];
  DeviceTable* tables_[2];
  CallCell* cells_[2];
  uint32_t* num_different_;
  cudaEvent_t events_[2][2];
};

void print_copy(const char* what, const Pair& pair, double us, const std::string& more) {
  std::printf(
      "{\"bench\": \"copy\", \"method\": \"%s\", \"bundle_mib\": %.1f, \"us\": %.2f, \"gbps\": "
      "%.1f%s}\n",
      what, static_cast<double>(pair.bytes()) / kMiB, us, pair.bytes() / us / 1000, more.c_str());
  std::fflush(stdout);
}

std::string describe(const ReplicationOptions& options, CopyWay how) {
  return ", \"rule\": \"" + std::string(how == CopyWay::kSami ? "sami" : "owner_direct") +
         "\", \"ctas\": " + std::to_string(options.num_ctas) +
         ", \"slice_bytes\": " + std::to_string(options.slice_bytes) +
         ", \"stages\": " + std::to_string(options.num_stages) +
         ", \"cluster\": " + std::to_string(options.cluster_size);
}

ReplicationOptions with_ring(int ctas, const RingShape& ring) {
  ReplicationOptions options;
  options.num_ctas = ctas;
  options.slice_bytes = ring.slice_bytes;
  options.num_stages = ring.num_stages;
  return options;
}

// The kernel alone: owner-direct on the owner's GPU, SAMI on both.
void bench_kernel(Pair& pair, CopyWay how, const ReplicationOptions& options) {
  pair.set_rule(how);
  const auto call = [&](int device, int index) { pair.replicate(device, options, index); };
  pair.check("copy", call);
  const double us = pair.time(0, how == CopyWay::kSami ? 1 : 0, call);
  print_copy("copy", pair, us, describe(options, how));
}

void bench_op(Pair& pair, CopyWay how, const ReplicationOptions& options) {
  pair.set_rule(how);
  const auto call = [&](int device, int index) {
    pair.replicate(device, options, index);
    pair.gate(device, index);
  };
  pair.check("op", call);
  print_copy("op", pair, pair.time(0, 1, call), describe(options, how));
  print_copy("op_alone", pair, pair.time(0, 1, call, 1, kAlone), describe(options, how));
}

void bench_tune() {
  const RingShape rings[] = {{4096, 24}, {8192, 12}, {16384, 4}, {16384, 6}, {32768, 3}};
  Pair pair(126 * kMiB, 1);
  for (const CopyWay how : {CopyWay::kOwnerDirect, CopyWay::kSami}) {
    for (const RingShape& ring : rings) {
      for (int ctas : {1, 4, 8, 16}) bench_kernel(pair, how, with_ring(ctas, ring));
    }
  }
}

void bench_memcpy(const Pair& pair) {
  const auto call = [&](int device, int) {
    if (device != 0) return;
    CHECK_CUDA(cudaMemcpyPeerAsync(pair.target(), 1, pair.source(), 0, pair.bytes(),
                                   pair.world.stream(0)));
  };
  pair.check("cudaMemcpyPeerAsync", call);
  print_copy("cudaMemcpyPeerAsync", pair, pair.time(0, 0, call), "");
}

void bench_plain(const Pair& pair) {
  double best = 1e30;
  std::string best_is;
  for (int pusher : {0, 1}) {
    for (int unroll : {4, 8}) {
      for (int ctas : {8, 16, 32, 64, 132}) {
        const auto call = [&](int device, int) {
          if (device != pusher) return;
          CHECK_CUDA(cudaSetDevice(device));
          bench::plain_copy(pair.target(), pair.source(), pair.bytes(), ctas, unroll,
                            pair.world.stream(device));
        };
        pair.check("plain", call);
        const double us = pair.time(pusher, pusher, call);
        const std::string is = std::string(", \"way\": \"") + (pusher == 0 ? "push" : "pull") +
                               "\", \"unroll\": " + std::to_string(unroll) +
                               ", \"ctas\": " + std::to_string(ctas);
        print_copy("plain", pair, us, is);
        if (us < best) best = us, best_is = is;
      }
    }
  }
  print_copy("plain_best", pair, best, best_is);
}

void bench_nccl(const Pair& pair, bench::Nccl& nccl) {
  void* const buffers[2] = {pair.source(), pair.target()};
  const cudaStream_t streams[2] = {pair.world.stream(0), pair.world.stream(1)};
  bool ok = true;
  const auto call = [&](int device, int) {
    if (device == 0) ok = ok && nccl.broadcast(buffers, pair.bytes(), 2, streams);
  };
  pair.check("ncclBroadcast", call);
  const double us = pair.time(0, 1, call);
  const double alone = pair.time(0, 1, call, 1, kAlone);
  const std::string version = ", \"version\": " + std::to_string(nccl.version());
  if (!ok) return;
  print_copy("ncclBroadcast", pair, us, version);
  print_copy("ncclBroadcast_alone", pair, alone, version);
}

void bench_sizes() {
  bench::Nccl nccl;
  const bool has_nccl = nccl.init(2);
  if (!has_nccl)
    std::printf(
        "{\"skipped\": \"ncclBroadcast\", \"why\": \"no libnccl; set ISER_NCCL_LIBRARY\"}\n");
  for (size_t mib : {10, 36, 126, 264}) {
    Pair pair(mib * kMiB, 1);
    bench_memcpy(pair);
    bench_plain(pair);
    if (has_nccl) bench_nccl(pair, nccl);
    for (const CopyWay how : {CopyWay::kOwnerDirect, CopyWay::kSami}) {
      for (int ctas : {1, 2, 4, 8, 16}) {
        ReplicationOptions options;
        options.num_ctas = ctas;
        bench_kernel(pair, how, options);
        bench_op(pair, how, options);
      }
    }
    if (has_nccl) bench_nccl(pair, nccl);  // again: what differs between the two is noise
  }
}

// The shared expert of one GPU: three bf16 products on a stream of ordinary priority.
class Gemms {
 public:
  static constexpr int kTokens = 8192, kHidden = 7168, kInner = 3072;

  explicit Gemms(int device) {
    CHECK_CUDA(cudaSetDevice(device));
    int lowest = 0, highest = 0;
    CHECK_CUDA(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
    CHECK_CUDA(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, lowest));
    is_ready = cublas.init(stream);
    const size_t sizes[] = {kTokens * kHidden, kInner * kHidden, kInner * kHidden, kHidden * kInner,
                            kTokens * kInner,  kTokens * kInner, kTokens * kHidden};
    for (int i = 0; i < 7; ++i) buffers_[i] = random_bf16(sizes[i]);
    for (cudaEvent_t* event : {&start, &copied, &end}) CHECK_CUDA(cudaEventCreate(event));
  }

  void run() {
    is_ready &= cublas.gemm(buffers_[0], buffers_[1], buffers_[4], kTokens, kInner, kHidden) &&
                cublas.gemm(buffers_[0], buffers_[2], buffers_[5], kTokens, kInner, kHidden) &&
                cublas.gemm(buffers_[4], buffers_[3], buffers_[6], kTokens, kHidden, kInner);
  }

  cudaStream_t stream;
  cudaEvent_t start, copied, end;
  bench::Cublas cublas;
  bool is_ready = false;

 private:
  static uint16_t* random_bf16(size_t count) {
    std::mt19937 random(static_cast<uint32_t>(count));
    std::vector<uint16_t> values(1 << 20);
    for (uint16_t& value : values) value = 0x3c00 | (random() & 0x81ff);  // +-[2^-7, 2^-4)
    uint16_t* device = nullptr;
    CHECK_CUDA(cudaMalloc(&device, count * sizeof(uint16_t)));
    for (size_t at = 0; at < count; at += values.size()) {
      World::set(device + at, values.data(), std::min(values.size(), count - at));
    }
    return device;
  }
  void* buffers_[7];
};

enum class Order { kNoCopy, kCopyFirst, kGemmFirst, kCopyOnly };

// One layer's start on both GPUs: returns the longer span, from the start to the later of the last
// product and the end of the kernel that publishes READY (a gate would take room from the
// products).
double span_us(Pair& pair, Gemms* gemms, Order order, const ReplicationOptions& options) {
  for (int d = 1; d >= 0; --d) {
    CHECK_CUDA(cudaSetDevice(d));
    CHECK_CUDA(cudaEventRecord(gemms[d].start, gemms[d].stream));
    CHECK_CUDA(cudaStreamWaitEvent(pair.world.stream(d), gemms[d].start));
    if (order == Order::kGemmFirst || order == Order::kNoCopy) gemms[d].run();
    if (order != Order::kNoCopy) pair.replicate(d, options, 0);
    if (order == Order::kCopyFirst) gemms[d].run();
    CHECK_CUDA(cudaEventRecord(gemms[d].copied, pair.world.stream(d)));
    CHECK_CUDA(cudaStreamWaitEvent(gemms[d].stream, gemms[d].copied));
    CHECK_CUDA(cudaEventRecord(gemms[d].end, gemms[d].stream));
  }
  double longest = 0;
  for (int d = 0; d < 2; ++d) {
    float ms = 0;
    CHECK_CUDA(cudaEventSynchronize(gemms[d].end));
    CHECK_CUDA(cudaEventElapsedTime(&ms, gemms[d].start, gemms[d].end));
    longest = std::max(longest, 1000.0 * ms);
  }
  return longest;
}

// Spans with and without the copy in turn, so that drifting clocks meet both alike.
void bench_span(Pair& pair, Gemms* gemms, Order order, const ReplicationOptions& options,
                int gemm_sms, const std::string& more) {
  constexpr int kWarmUp = 4, kPairs = 31;
  std::vector<double> alone, spans, growth;
  const auto span = [&](Order which, int sms) {
    for (int d = 0; d < 2; ++d) gemms[d].is_ready &= gemms[d].cublas.use_sms(sms);
    pair.rewind();
    return span_us(pair, gemms, which, options);
  };
  for (int i = 0; i < kWarmUp + kPairs; ++i) {
    const double without = span(Order::kNoCopy, 0), with = span(order, gemm_sms);
    if (i < kWarmUp) continue;
    alone.push_back(without);
    spans.push_back(with);
    growth.push_back(with - without);
  }
  pair.expect_no_failure();
  constexpr const char* kNames[] = {"no_copy", "copy_first", "gemm_first", "copy_only"};
  std::printf(
      "{\"bench\": \"beside\", \"order\": \"%s\", \"alone_us\": %.1f, \"span_us\": %.1f, "
      "\"growth_us\": %.1f, \"growth_quartiles_us\": [%.1f, %.1f], \"gemm_sms\": %d%s}\n",
      kNames[static_cast<int>(order)], median(alone), median(spans), median(growth),
      quantile(growth, 0.25), quantile(growth, 0.75), gemm_sms, more.c_str());
  std::fflush(stdout);
}

void bench_rule_beside(Pair& pair, Gemms* gemms, CopyWay how) {
  pair.set_rule(how);
  const auto check = [&](const ReplicationOptions& options) {
    pair.check("beside", [&](int device, int index) { pair.replicate(device, options, index); });
  };
  for (int ctas : {2, 4, 8, 16}) {
    for (int cluster : {1, 2, 4}) {
      if (cluster > ctas) continue;
      ReplicationOptions options;
      options.num_ctas = ctas;
      options.cluster_size = cluster;
      check(options);
      const std::string more = describe(options, how);
      if (cluster == 1) bench_span(pair, gemms, Order::kCopyOnly, options, 0, more);
      for (const Order order : {Order::kCopyFirst, Order::kGemmFirst}) {
        for (int sms : {0, 128, 132 - ctas}) {
          bench_span(pair, gemms, order, options, sms, more);
        }
      }
    }
  }
  // Small enough to share an SM with a product's CTA.
  for (int ctas : {32, 64}) {
    const ReplicationOptions options = with_ring(ctas, {4096, 3});
    check(options);
    for (const Order order : {Order::kCopyFirst, Order::kGemmFirst}) {
      bench_span(pair, gemms, order, options, 0, describe(options, how));
    }
  }
}

void bench_beside() {
  Pair pair(static_cast<size_t>(37'000'000), 4);
  Gemms gemms[2] = {Gemms(0), Gemms(1)};
  if (!gemms[0].is_ready || !gemms[1].is_ready) {
    std::printf("{\"skipped\": \"beside\", \"why\": \"no cuBLAS; set ISER_CUBLAS_LIBRARY\"}\n");
    return;
  }
  std::printf("{\"cublas\": %d}\n", gemms[0].cublas.version());
  for (int i = 0; i < 50; ++i) span_us(pair, gemms, Order::kNoCopy, {});  // clocks
  bench_span(pair, gemms, Order::kNoCopy, {}, 0, "");  // its growth is the noise of all that follow
  for (const CopyWay how : {CopyWay::kOwnerDirect, CopyWay::kSami}) {
    bench_rule_beside(pair, gemms, how);
  }
  for (int sms : {0, 130, 128, 124, 116}) bench_span(pair, gemms, Order::kNoCopy, {}, sms, "");
  if (!gemms[0].is_ready || !gemms[1].is_ready)
    std::printf("{\"error\": \"a cuBLAS call failed\"}\n");
}

}  // namespace

int main(int argc, char** argv) {
  int gpus = num_gpus();
  std::vector<std::string> parts;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--gpus" && i + 1 < argc) {
      gpus = std::min(gpus, std::atoi(argv[++i]));
    } else {
      parts.emplace_back(argv[i]);
    }
  }
  if (gpus < 2) {
    std::printf("{\"skipped\": \"all\", \"why\": \"needs two GPUs, has %d\"}\n", gpus);
    return 0;
  }
  const auto is_asked = [&](const char* part) {
    return parts.empty() || std::find(parts.begin(), parts.end(), part) != parts.end();
  };
  prepare_gpus(2);
  cudaDeviceProp properties;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  std::printf("{\"device\": \"2x %s\", \"sms\": %d, \"cuda\": %d}\n", properties.name,
              properties.multiProcessorCount, CUDART_VERSION);
  if (is_asked("tune")) bench_tune();
  if (is_asked("sizes")) bench_sizes();
  if (is_asked("beside")) bench_beside();
  return 0;
}
