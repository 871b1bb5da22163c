// fused_moe: dispatch by pull, expert tiles in slot order, combine.
//
// A rank lists the rows of a wave as (source, route) pairs in slot order and cuts them into tiles;
// a tile reads its rows from the sources' token sections and writes them to the sources' combine
// sections. Tiles of helper slots open once every rank is READY.
#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "ffi/cpu/domain.h"
#include "ffi/cpu/fp8_rows.h"
#include "ffi/cpu/pool.h"

namespace iser::cpu {
namespace {

constexpr size_t kTaskTokens = 64;  // tokens that a task takes to quantise or to combine

struct Row {
  int32_t source;
  int32_t route;  // token * top_k + k
};

struct Tile {
  int32_t slot;          // local
  int32_t first, count;  // rows of the wave
};

// One wave of a rank: at most max_routes_per_rank rows.
struct Wave {
  std::vector<Row> rows;
  std::vector<Tile> tiles;
  size_t num_home_tiles = 0;
};

// Where the next wave of a rank begins.
struct WavePosition {
  int32_t slot = 0;
  int32_t source = 0;
  int32_t taken = 0;  // of that source's routes to that slot
};

// Elements as f32, and back: to nearest, ties to even.
struct F32 {
  using Stored = float;
  static float read(Stored value) { return value; }
  static Stored write(float value) { return value; }
};
struct BF16 {
  using Stored = uint16_t;
  static float read(Stored value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float result;
    std::memcpy(&result, &bits, sizeof(result));
    return result;
  }
  static Stored write(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return static_cast<Stored>(value != value ? 0x7fc0 : rounded);
  }
};

void add_tiles(Wave& wave, int32_t slot, size_t first, size_t tile_rows) {
  for (size_t at = first; at < wave.rows.size(); at += tile_rows) {
    const size_t count = std::min(tile_rows, wave.rows.size() - at);
    wave.tiles.push_back({slot, static_cast<int32_t>(at), static_cast<int32_t>(count)});
  }
}

Wave next_wave(const Domain& domain, int32_t rank, WavePosition& position) {
  const DomainShape& shape = domain.shape();
  const size_t limit = domain.options.max_routes_per_rank;
  const size_t tile_rows =
      preferred_tile_rows(shape.hidden, shape.intermediate, domain.options.dtype);
  Wave wave;
  for (; position.slot < shape.slots.stride(); ++position.slot, position.source = 0) {
    const int32_t physical = rank * shape.slots.stride() + position.slot;
    const size_t first = wave.rows.size();
    for (; position.source < shape.slots.num_ranks; ++position.source, position.taken = 0) {
      const BlockView source = domain.block(position.source);
      const int32_t* starts = source.section<int32_t>(Section::kSendStarts);
      const int32_t* routes = source.section<int32_t>(Section::kSendRoutes);
      int32_t at = starts[physical] + position.taken;
      for (; at < starts[physical + 1] && wave.rows.size() < limit; ++at, ++position.taken) {
        wave.rows.push_back({position.source, routes[at]});
      }
      if (at < starts[physical + 1]) break;  // the wave is full
    }
    add_tiles(wave, position.slot, first, tile_rows);
    if (position.slot < shape.slots.num_home()) wave.num_home_tiles = wave.tiles.size();
    if (position.source < shape.slots.num_ranks) break;
  }
  return wave;
}

std::byte* thread_scratch(size_t bytes) {
  struct Free {
    void operator()(std::byte* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<std::byte, Free> scratch;
  thread_local size_t size = 0;
  if (size < bytes) {
    size = align_up(bytes, 64);
    scratch.reset(static_cast<std::byte*>(std::aligned_alloc(64, size)));
  }
  return scratch.get();
}

// What the tiles of one rank need beside their rows.
struct TileRunner {
  Domain& domain;
  const Invocation& invocation;
  const FusedCall& call;
  int32_t rank;
  int32_t local_idx;

  void weights_of(int32_t slot, ExpertTile& tile) const {
    const DomainShape& shape = domain.shape();
    const int32_t home = shape.slots.num_home();
    const BundleLayout& bundle = domain.bundle();
    const uint8_t* planes[kMaxPlanes];
    const uint8_t* helper = nullptr;
    if (slot >= home) {
      helper = domain.block(rank).helper(shape, domain.bank_of(invocation.call.layer), slot - home);
    }
    const size_t home_idx = static_cast<size_t>(local_idx) * home + slot;
    for (int32_t i = 0; i < bundle.num_planes; ++i) {
      planes[i] = helper ? helper + bundle.planes[i].offset
                         : invocation.call.weights[i] + home_idx * bundle.planes[i].bytes;
    }
    tile.gate = planes[kGatePlane], tile.up = planes[kUpPlane], tile.down = planes[kDownPlane];
    if (!shape.has_biases) return;
    tile.gate_bias = reinterpret_cast<const float*>(planes[kGateBiasPlane]);
    tile.up_bias = reinterpret_cast<const float*>(planes[kUpBiasPlane]);
    tile.down_bias = reinterpret_cast<const float*>(planes[kDownBiasPlane]);
  }

  void run(const Wave& wave, size_t index) const {
    const DomainShape& shape = domain.shape();
    const Tile& tile = wave.tiles[index];
    const int64_t begin = thread_cpu_ns();
    std::vector<const void*> rows(tile.count);
    std::vector<void*> out_rows(tile.count);
    for (int32_t i = 0; i < tile.count; ++i) {
      const Row& row = wave.rows[tile.first + i];
      const BlockView source = domain.block(row.source);
      rows[i] = source.section<uint8_t>(Section::kTokens) +
                shape.token_bytes() * (row.route / shape.top_k);
      out_rows[i] = source.section<uint8_t>(Section::kCombine) + shape.row_bytes() * row.route;
    }
    ExpertTile expert{};
    expert.rows = rows.data();
    expert.out_rows = out_rows.data();
    expert.num_rows = tile.count;
    expert.hidden = shape.hidden;
    expert.intermediate = shape.intermediate;
    expert.dtype = domain.options.dtype;
    expert.weight_format = shape.weight_format;
    expert.activation = shape.activation;
    weights_of(tile.slot, expert);
    const size_t bytes =
        expert_tile_scratch_bytes(shape.hidden, shape.intermediate, tile.count, expert.dtype);
    const bool has_scales = shape.token_format == TokenFormat::kFloat8Row128;
    const size_t row_bytes = has_scales ? sizeof(float) * tile.count * shape.hidden : 0;
    std::byte* scratch = thread_scratch(bytes + row_bytes);
    if (has_scales) dequantize_rows(reinterpret_cast<float*>(scratch + bytes), rows);
    expert_tile(expert, scratch);
    domain.charge(invocation.call.layer, rank, thread_cpu_ns() - begin, tile.count);
    report(wave, tile);
  }

  // Token records become f32 rows, kept in `floats`.
  void dequantize_rows(float* floats, std::vector<const void*>& rows) const {
    for (const void*& row : rows) {
      dequantize_row(static_cast<const uint8_t*>(row), domain.shape().hidden, floats);
      row = floats;
      floats += domain.shape().hidden;
    }
  }

  // Tells each source how many of its routes are done; rows of a tile are grouped by source.
  void report(const Wave& wave, const Tile& tile) const {
    for (int32_t i = 0; i < tile.count;) {
      const int32_t source = wave.rows[tile.first + i].source;
      uint32_t count = 0;
      for (; i < tile.count && wave.rows[tile.first + i].source == source; ++i) ++count;
      RankWords* words = domain.block(source).words();
      if (add_release(&words->routes_done, count) == words->routes_expected) {
        wake_all(&words->routes_done);
      }
    }
  }
};

// The rank's tokens as they are dispatched in FP8, in chunks over the pool.
template <typename Element>
void quantize_tokens(const DomainShape& shape, size_t num_tokens, const uint8_t* x,
                     uint8_t* records) {
  const size_t chunks = (num_tokens + kTaskTokens - 1) / kTaskTokens;
  Pool::shared().run(chunks, [&](size_t chunk) {
    const size_t last = std::min(num_tokens, (chunk + 1) * kTaskTokens);
    for (size_t t = chunk * kTaskTokens; t < last; ++t) {
      const auto* row =
          reinterpret_cast<const typename Element::Stored*>(x + t * shape.row_bytes());
      quantize_row<Element>(row, shape.hidden, records + t * shape.token_bytes());
    }
  });
}

void publish_tokens(Domain& domain, const Invocation& invocation, const FusedCall& call,
                    int32_t rank, int32_t local_idx) {
  const DomainShape& shape = domain.shape();
  const BlockView block = domain.block(rank);
  const size_t tokens = invocation.call.num_tokens, bytes = shape.row_bytes() * tokens;
  const uint8_t* x = call.x + local_idx * bytes;
  uint8_t* published = block.section<uint8_t>(Section::kTokens);
  if (domain.options.poison) {  // 0xffff is a NaN in every dtype
    for (Section section : {Section::kTokens, Section::kCombine}) {
      std::memset(block.section<uint8_t>(section), 0xff,
                  domain.layout.bytes[static_cast<int>(section)]);
    }
    if (bytes > 0) std::memset(call.y + local_idx * bytes, 0xff, bytes);
  }
  if (shape.token_format == TokenFormat::kFloat8Row128) {
    domain.options.dtype == DType::kF32 ? quantize_tokens<F32>(shape, tokens, x, published)
                                        : quantize_tokens<BF16>(shape, tokens, x, published);
  } else if (bytes > 0) {
    std::memcpy(published, x, bytes);
  }
  RankWords* words = block.words();
  words->routes_expected =
      static_cast<uint32_t>(block.section<int32_t>(Section::kSendStarts)[shape.slots.num_slots()]);
  store_release(&words->routes_done, 0);
  domain.arrive(Stage::kDispatch, rank, invocation.generation);
}

// y[t] = sum over k, in order, of weight * expert output, in f32; padding adds nothing.
template <typename Element>
void combine_tokens(const Domain& domain, const Invocation& invocation, const FusedCall& call,
                    int32_t rank, int32_t local_idx, size_t first, size_t last) {
  using Stored = typename Element::Stored;
  const DomainShape& shape = domain.shape();
  const size_t hidden = shape.hidden, top_k = shape.top_k;
  const Stored* outputs = domain.block(rank).section<Stored>(Section::kCombine);
  const size_t row0 = static_cast<size_t>(local_idx) * invocation.call.num_tokens;
  const int32_t* route_slot = invocation.route_slot.data() + row0 * top_k;
  const float* weights = call.topk_weights + row0 * top_k;
  std::vector<float> sum(hidden);
  for (size_t t = first; t < last; ++t) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (size_t route = t * top_k; route < (t + 1) * top_k; ++route) {
      if (route_slot[route] < 0) continue;
      const float weight = weights[route];
      const Stored* row = outputs + route * hidden;
      for (size_t d = 0; d < hidden; ++d) sum[d] += weight * Element::read(row[d]);
    }
    Stored* out = reinterpret_cast<Stored*>(call.y) + (row0 + t) * hidden;
    for (size_t d = 0; d < hidden; ++d) out[d] = Element::write(sum[d]);
  }
}

// The device's tokens, in chunks over the pool.
void combine(const Domain& domain, const Invocation& invocation, const FusedCall& call,
             int32_t first_rank) {
  const size_t tokens = invocation.call.num_tokens;
  const size_t chunks = (tokens + kTaskTokens - 1) / kTaskTokens;
  const auto combine_chunk =
      domain.options.dtype == DType::kF32 ? combine_tokens<F32> : combine_tokens<BF16>;
  Pool::shared().run(domain.options.ranks_per_device * chunks, [&](size_t task) {
    const int32_t v = static_cast<int32_t>(task / chunks);
    const size_t first = task % chunks * kTaskTokens;
    combine_chunk(domain, invocation, call, first_rank + v, v, first,
                  std::min(tokens, first + kTaskTokens));
  });
}

bool plans_agree(Domain& domain, const Invocation& invocation, int32_t rank) {
  for (int32_t r = 0; r < domain.shape().slots.num_ranks; ++r) {
    const uint64_t hash = domain.block(r).words()->plan_hash;
    if (hash == invocation.plan->hash) continue;
    domain.fail({static_cast<int32_t>(ErrorCode::kPlanMismatch), rank, r, invocation.call.layer,
                 static_cast<int32_t>(Stage::kReady), invocation.generation, invocation.plan->hash,
                 hash});
    return false;
  }
  return true;
}

// All waves of the device's ranks; helper tiles open behind READY.
bool run_tiles(Domain& domain, Invocation& invocation, const FusedCall& call, int32_t first_rank) {
  const int32_t ranks = domain.options.ranks_per_device;
  Pool& pool = Pool::shared();
  std::vector<WavePosition> positions(ranks);
  bool is_ready = false, ok = true;
  for (bool more = true; more && ok;) {
    more = false;
    std::vector<Wave> waves(ranks);
    std::vector<std::shared_ptr<Batch>> batches;
    for (int32_t v = 0; v < ranks; ++v) {
      Wave& wave = waves[v] = next_wave(domain, first_rank + v, positions[v]);
      more |= positions[v].slot < domain.shape().slots.stride();
      const TileRunner runner{domain, invocation, call, first_rank + v, v};
      batches.push_back(pool.submit(wave.tiles.size(),
                                    is_ready ? wave.tiles.size() : wave.num_home_tiles,
                                    [runner, &wave](size_t i) { runner.run(wave, i); }));
    }
    if (!is_ready) {
      ok = domain.wait(Stage::kReady, first_rank, invocation) &&
           plans_agree(domain, invocation, first_rank);
      invocation.times.ready_seen = now_ns();
      is_ready = true;
    }
    for (const auto& batch : batches) ok ? pool.open_all(*batch) : pool.cancel(*batch);
    for (const auto& batch : batches) pool.wait(*batch);
  }
  return ok;
}

}  // namespace

bool fused_moe(Domain& domain, Invocation& invocation, const FusedCall& call, int32_t first_rank) {
  const int32_t ranks = domain.options.ranks_per_device;
  const size_t tokens = invocation.call.num_tokens;
  bool ok = !domain.has_failed() && invocation.plan != nullptr;
  if (ok) {
    for (int32_t v = 0; v < ranks; ++v) {
      publish_tokens(domain, invocation, call, first_rank + v, v);
    }
    ok = domain.wait(Stage::kDispatch, first_rank, invocation) &&
         run_tiles(domain, invocation, call, first_rank);
  }
  for (int32_t v = 0; ok && v < ranks; ++v) ok = domain.wait_combined(first_rank + v, invocation);
  if (!ok) {
    std::memset(call.y, 0xff, ranks * tokens * domain.shape().row_bytes());
    return false;
  }
  combine(domain, invocation, call, first_rank);
  return true;
}

}  // namespace iser::cpu
