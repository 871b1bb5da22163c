// The rows and tiles of a rank's fused MoE layer, as numbers: which rows each tile takes, and in
// which order tiles are handed out.
//
// A rank's rows are ordered by (local slot, source, position in the source's send list) and cut
// into waves of at most `wave_rows`, which share one workspace. Tiles are numbered so that each
// depends on rows and on tiles of lower numbers alone: whoever takes them in this order never waits
// for a tile that nobody has taken.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ffi/core/expert.h"
#include "ffi/core/layout.h"

namespace iser::cuda {

// Rows of a tile, columns of h that a tile of GEMM 1 makes, columns of y that one of GEMM 2 makes.
struct TileShape {
  int32_t rows;  // a power of two
  int32_t inner;
  int32_t hidden;  // a multiple of kUnitColumns
};

constexpr int32_t kUnitColumns = 64;                 // routes_done counts routes times these
constexpr int32_t kLeastChunk = 2, kMostChunk = 16;  // row blocks whose tiles are numbered together
constexpr int32_t kSplitRows = 64;  // tiles are loaded and multiplied in whole ones of so many rows

ISER_HD inline int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
ISER_HD inline int32_t at_most(int32_t a, int32_t b) { return a < b ? a : b; }
ISER_HD inline int32_t at_least(int32_t a, int32_t b) { return a > b ? a : b; }

enum class Gemm : int32_t { kInner = 0, kHidden = 1, kNone = 2 };  // kNone ends a rank's tiles

struct MoeSizes {
  SlotSpace slots;
  int32_t top_k, hidden, intermediate, element_bytes;
  int32_t ranks_per_device;
  int32_t num_tokens;  // of one rank
  int32_t wave_rows;   // rows that the workspace of a rank holds
  TileShape tile;
  int32_t cluster_size;  // CTAs that take an item: tiles of the same rows, a column each
  WeightFormat weight_format = WeightFormat::kBFloat16;
  TokenFormat token_format = TokenFormat::kBFloat16;
  int32_t chunk_blocks = kMostChunk;  // changes no size

  ISER_HD bool is_fp8() const { return weight_format == WeightFormat::kFloat8Block128; }
  // Of a row of the workspace: a token as it is dispatched, and h.
  ISER_HD size_t token_bytes() const { return token_bytes_of(token_format, hidden); }
  ISER_HD size_t inner_bytes() const {
    return static_cast<size_t>(intermediate) * (is_fp8() ? 1 : element_bytes);
  }
  // Rows that the workspace holds, as the scales' arrays count them.
  ISER_HD size_t held_scales() const {
    return align_up(static_cast<size_t>(ranks_per_device) * wave_rows, 4);
  }
  ISER_HD int64_t max_rows() const {
    return static_cast<int64_t>(slots.num_ranks) * num_tokens * top_k;
  }
  ISER_HD int32_t num_runs() const { return slots.stride() * slots.num_ranks; }
  ISER_HD int32_t inner_tiles() const { return ceil_div(intermediate, tile.inner); }
  ISER_HD int32_t hidden_tiles() const { return ceil_div(hidden, tile.hidden); }
  ISER_HD int32_t column_tiles(Gemm gemm) const {
    return gemm == Gemm::kInner ? inner_tiles() : hidden_tiles();
  }
  // Items of a row block; the last may hold columns that are not there.
  ISER_HD int32_t items(Gemm gemm) const { return ceil_div(column_tiles(gemm), cluster_size); }
  ISER_HD int32_t units_per_route() const { return ceil_div(hidden, kUnitColumns); }
};

// Neighbouring rows of a slot in tiles that are alike up to 64 rows: a short one takes longer than
// its rows, since it loads as many weights. Neighbouring tiles are split as their rows alone are.
struct RowSplit {
  int32_t rows, each, extra;  // units of 64 rows of a tile; tiles with one more

  ISER_HD RowSplit(int32_t num_rows, int32_t tiles) : rows(num_rows) {
    const int32_t units = ceil_div(rows, kSplitRows);
    each = units / tiles;
    extra = units - each * tiles;
  }
  ISER_HD int32_t first(int32_t tile) const {
    return (tile * each + at_most(tile, extra)) * kSplitRows;
  }
  ISER_HD int32_t count(int32_t tile) const {
    return at_most(rows - first(tile), (each + (tile < extra)) * kSplitRows);
  }
  ISER_HD int32_t tile_of(int32_t row) const {
    const int32_t unit = row / kSplitRows, longer = extra * (each + 1);
    return unit < longer ? unit / (each + 1) : extra + (unit - longer) / each;
  }
};

// Items with consecutive numbers: all of one product over some rows of a slot, rows fastest, so
// that a weight tile meets all of them while it is in L2.
struct Segment {
  int32_t first_item;
  Gemm gemm;
  int32_t slot;  // local
  int32_t wave;
  int32_t row, num_rows;  // of the rank
  int32_t block, num_blocks;
};

struct Tile {
  Gemm gemm;
  int32_t slot;
  int32_t wave;
  int32_t row, num_rows;  // of the rank
  int32_t block;          // its counters
  int32_t column;         // first column of h or y, in tiles; may lie behind the last
};

struct ScheduleHead {
  int32_t num_items;
  int32_t num_home_items;  // the first ones; the others wait for READY
  int32_t num_segments;
  int32_t num_rows;
};

// Upper bounds for any routing.
struct ScheduleLimits {
  int32_t waves, groups, blocks, segments;

  ISER_HD explicit ScheduleLimits(const MoeSizes& sizes) {
    const int64_t rows = sizes.max_rows();
    waves = static_cast<int32_t>((rows + sizes.wave_rows - 1) / sizes.wave_rows);
    waves = at_least(waves, 1);
    groups = sizes.slots.stride() + waves;
    blocks = static_cast<int32_t>(rows / sizes.tile.rows) + groups;
    segments = num_segments(kLeastChunk);
  }
  ISER_HD int32_t num_segments(int32_t chunk) const { return 2 * (blocks / chunk + groups); }
};

// The run of rows (local slot, source) that `row` lies in, given where each begins.
ISER_HD inline int32_t run_of(const int32_t* run_first, int32_t num_runs, int32_t row) {
  int32_t low = 0, high = num_runs;  // run_first[low] <= row < run_first[high]
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    (run_first[middle] <= row ? low : high) = middle;
  }
  return low;
}

// Blocks are numbered by (wave, slot) group, whose index is wave + slot: both only grow. The block
// of a row of the slot, whose rows are slot_first to slot_end.
ISER_HD inline int32_t block_of(const MoeSizes& sizes, const int32_t* first_block, int32_t slot,
                                int32_t slot_first, int32_t slot_end, int32_t row) {
  const int32_t wave = row / sizes.wave_rows, wave_first = wave * sizes.wave_rows;
  const int32_t begin = at_least(slot_first, wave_first);
  const int32_t rows = at_most(slot_end - begin, wave_first - begin + sizes.wave_rows);
  const RowSplit split(rows, ceil_div(rows, sizes.tile.rows));
  return first_block[wave + slot] + split.tile_of(row - begin);
}

// Blocks of rows whose tiles are numbered together where so many items are computed at once: these
// are `chunk` blocks by the other items' columns, and load least where both sides are as long.
ISER_HD inline int32_t chunk_blocks(const MoeSizes& sizes, int32_t items) {
  const int32_t columns = 2 * sizes.tile.inner * sizes.cluster_size;  // rows of weights
  int32_t chunk = kLeastChunk;
  while (chunk < kMostChunk &&
         (chunk + 1) * chunk * int64_t{sizes.tile.rows} <= int64_t{items} * columns) {
    ++chunk;
  }
  return chunk;
}

// Hands out numbers to segments. Products of h follow those that make it once `lag` other items lie
// between them, so that h is done when they are reached; all of a region's tiles (home slots of a
// wave, helper slots of a wave) come before those of the next.
struct ScheduleBuilder {
  const MoeSizes& sizes;
  int32_t lag;
  Segment* segments;
  int32_t* wave_tiles;  // of GEMM 2, by wave
  // One thread makes the schedule: what does not change is divided once.
  int32_t inner_items, hidden_items, hidden_tiles, tile_shift = 0;
  int32_t num_segments = 0, num_items = 0;
  int32_t oldest = 0;  // segment from which on products of h may be missing

  ISER_HD ScheduleBuilder(const MoeSizes& sizes_, int32_t lag_, Segment* segments_,
                          int32_t* wave_tiles_)
      : sizes(sizes_),
        lag(lag_),
        segments(segments_),
        wave_tiles(wave_tiles_),
        inner_items(sizes.items(Gemm::kInner)),
        hidden_items(sizes.items(Gemm::kHidden)),
        hidden_tiles(sizes.hidden_tiles()) {
    while (1 << tile_shift < sizes.tile.rows) ++tile_shift;
  }

  ISER_HD int32_t num_blocks(int32_t rows) const {
    return (rows + sizes.tile.rows - 1) >> tile_shift;
  }

  // Products that make h, in chunks of as many blocks as each other but for the last.
  ISER_HD void emit_inner(int32_t slot, int32_t wave, int32_t row, int32_t rows, int32_t block,
                          int32_t blocks) {
    if (blocks <= sizes.chunk_blocks) {  // mostly: and divisions are slow
      emit(Gemm::kInner, slot, wave, row, rows, block, blocks);
      emit_due(lag);
      return;
    }
    const int32_t chunk = ceil_div(blocks, ceil_div(blocks, sizes.chunk_blocks));
    const RowSplit split(rows, blocks);
    for (int32_t first = 0; first < blocks; first += chunk) {
      const int32_t next = at_most(first + chunk, blocks);
      const int32_t begin = split.first(first), end = at_most(split.first(next), rows);
      emit(Gemm::kInner, slot, wave, row + begin, end - begin, block + first, next - first);
      emit_due(lag);
    }
  }

  ISER_HD void emit(Gemm gemm, int32_t slot, int32_t wave, int32_t row, int32_t rows, int32_t block,
                    int32_t blocks) {
    segments[num_segments++] = {num_items, gemm, slot, wave, row, rows, block, blocks};
    num_items += blocks * (gemm == Gemm::kInner ? inner_items : hidden_items);
  }

  // Emits the products of h that are due, all of them with a lag of 0.
  ISER_HD void emit_due(int32_t wanted) {
    for (; oldest < num_segments; ++oldest) {
      const Segment made = segments[oldest];
      if (made.gemm != Gemm::kInner) continue;
      const int32_t end = made.first_item + made.num_blocks * inner_items;
      if (num_items - end < wanted) return;
      emit(Gemm::kHidden, made.slot, made.wave, made.row, made.num_rows, made.block,
           made.num_blocks);
      wave_tiles[made.wave] += made.num_blocks * hidden_tiles;
    }
  }
};

// The schedule of a rank whose slots begin at rows slot_first [stride + 1]. Fills `segments`,
// `first_block` [groups] (only of groups with rows) and `wave_tiles` [waves].
ISER_HD inline ScheduleHead build_schedule(const MoeSizes& sizes, const int32_t* slot_first,
                                           int32_t lag, Segment* segments, int32_t* first_block,
                                           int32_t* wave_tiles) {
  ScheduleBuilder builder(sizes, lag, segments, wave_tiles);
  const int32_t stride = sizes.slots.stride();
  int32_t wave = 0, block = 0, row = 0, num_home_items = 0;
  wave_tiles[0] = 0;
  for (int32_t slot = 0; slot < stride; ++slot) {
    if (slot == sizes.slots.num_home()) {
      builder.emit_due(0);
      num_home_items = builder.num_items;
    }
    const int32_t end = slot_first[slot + 1];
    while (row < end) {
      if (row - wave * sizes.wave_rows >= sizes.wave_rows) {
        builder.emit_due(0);
        wave_tiles[++wave] = 0;
      }
      const int32_t stop =
          end - wave * sizes.wave_rows < sizes.wave_rows ? end : (wave + 1) * sizes.wave_rows;
      first_block[wave + slot] = block;
      const int32_t rows = stop - row, blocks = builder.num_blocks(rows);
      builder.emit_inner(slot, wave, row, rows, block, blocks);
      row = stop;
      block += blocks;
    }
  }
  builder.emit_due(0);
  if (stride == sizes.slots.num_home()) num_home_items = builder.num_items;
  return {builder.num_items, num_home_items, builder.num_segments, row};
}

// The item's first tile; those of other columns follow.
ISER_HD inline Tile tile_of(const MoeSizes& sizes, const Segment& segment, int32_t item) {
  const int32_t index = item - segment.first_item;
  const int32_t m = index % segment.num_blocks,
                column = index / segment.num_blocks * sizes.cluster_size;
  const RowSplit split(segment.num_rows, segment.num_blocks);
  return {segment.gemm,   segment.slot,      segment.wave, segment.row + split.first(m),
          split.count(m), segment.block + m, column};
}

// Units of routes_done that one row of a tile of GEMM 2 adds.
ISER_HD inline int32_t tile_units(const MoeSizes& sizes, int32_t column) {
  const int32_t columns = at_most(sizes.hidden - column * sizes.tile.hidden, sizes.tile.hidden);
  return ceil_div(columns, kUnitColumns);
}

// Byte offsets of the workspace; counters are zeroed at the start of every call, nothing else is
// read before it has been written.
struct MoeLayout {
  ScheduleLimits limits;
  size_t rank_counters;  // bytes of a rank
  size_t rank_tables;
  size_t counters, tables, maps, rows, inner, total;
  size_t row_scales, inner_scales;  // of FP8: f32 [columns / 128, held_scales]

  ISER_HD explicit MoeLayout(const MoeSizes& sizes);
};

// Of the device. The gate writes the verdict: 0, or the ErrorCode with which the call has failed.
struct DeviceWords {
  uint32_t begun;     // CTAs
  uint32_t combined;  // CTAs
  int32_t verdict;
};

struct RankCounters {
  uint32_t* next_item;    // of the schedule
  uint32_t* next_row;     // to pull
  uint32_t* hidden_done;  // [waves] tiles of GEMM 2
  uint32_t* rows_done;    // [blocks] rows pulled
  uint32_t* inner_done;   // [blocks] tiles of GEMM 1
};

// Where a row's tokens come from and its result goes: the source's route token * top_k + k.
struct RowSource {
  int32_t rank;
  int32_t route;
};

struct RankTables {
  ScheduleHead* head;
  int32_t* run_first;    // [runs + 1] first row of (local slot, source)
  int32_t* run_start;    // [runs] where it begins in the source's send list
  int32_t* first_block;  // [groups]
  int32_t* wave_tiles;   // [waves]
  Segment* segments;     // [segments]
  RowSource* sources;    // [wave_rows]
};

constexpr size_t kMapBytes = 128, kMapsPerRank = kNumWeightPlanes;
constexpr size_t kCounterLine = 128;  // what different CTAs fight for lies this far apart

ISER_HD inline MoeLayout::MoeLayout(const MoeSizes& sizes) : limits(sizes) {
  const size_t ranks = sizes.ranks_per_device, runs = sizes.num_runs();
  rank_counters = align_up(
      2 * kCounterLine + sizeof(uint32_t) * (limits.waves + 2 * size_t(limits.blocks)), 128);
  rank_tables = align_up(sizeof(ScheduleHead), 16) +
                sizeof(int32_t) * (2 * runs + 1 + limits.groups + limits.waves) + 16;
  rank_tables = align_up(rank_tables, 32) + sizeof(Segment) * limits.segments +
                sizeof(RowSource) * sizes.wave_rows;
  rank_tables = align_up(rank_tables, 128);
  const size_t rows_held = ranks * sizes.wave_rows;
  counters = 0;
  tables = kCounterLine + ranks * rank_counters;
  maps = tables + ranks * rank_tables;
  rows = maps + ranks * kMapsPerRank * kMapBytes;
  inner = align_up(rows + rows_held * sizes.token_bytes(), 128);
  row_scales = align_up(inner + rows_held * sizes.inner_bytes(), 128);
  const size_t scale_bytes = sizes.is_fp8() ? sizeof(float) * sizes.held_scales() : 0;
  inner_scales = align_up(row_scales + scale_bytes * fp8::num_blocks(sizes.hidden), 128);
  total = align_up(inner_scales + scale_bytes * fp8::num_blocks(sizes.intermediate), 128);
}

// The workspace at its addresses.
struct MoeWorkspace {
  const MoeSizes& sizes;
  const MoeLayout& layout;
  uint8_t* base;

  ISER_HD DeviceWords* words() const {
    return reinterpret_cast<DeviceWords*>(base + layout.counters);
  }
  ISER_HD RankCounters counters(int32_t local_idx) const {
    uint8_t* at = base + layout.counters + kCounterLine + local_idx * layout.rank_counters;
    uint32_t* arrays = reinterpret_cast<uint32_t*>(at + 2 * kCounterLine);
    uint32_t* rows_done = arrays + layout.limits.waves;
    return {reinterpret_cast<uint32_t*>(at), reinterpret_cast<uint32_t*>(at + kCounterLine), arrays,
            rows_done, rows_done + layout.limits.blocks};
  }
  ISER_HD RankTables tables(int32_t local_idx) const {
    uint8_t* at = base + layout.tables + local_idx * layout.rank_tables;
    const int32_t runs = sizes.num_runs();
    RankTables t;
    t.head = reinterpret_cast<ScheduleHead*>(at);
    t.run_first = reinterpret_cast<int32_t*>(at + align_up(sizeof(ScheduleHead), 16));
    t.run_start = t.run_first + runs + 1;
    t.first_block = t.run_start + runs;
    t.wave_tiles = t.first_block + layout.limits.groups;
    uint8_t* arrays =
        at + align_up(sizeof(ScheduleHead), 16) +
        sizeof(int32_t) * (2 * size_t(runs) + 1 + layout.limits.groups + layout.limits.waves);
    t.segments = reinterpret_cast<Segment*>(base + align_up(arrays - base, 32));
    t.sources = reinterpret_cast<RowSource*>(t.segments + layout.limits.segments);
    return t;
  }
  ISER_HD uint8_t* map(int32_t local_idx, int32_t which) const {
    return base + layout.maps + (local_idx * kMapsPerRank + which) * kMapBytes;
  }
  // Row `row` of a rank, by its place in its wave.
  ISER_HD int64_t held_row(int32_t local_idx, int32_t row) const {
    return static_cast<int64_t>(local_idx) * sizes.wave_rows + row % sizes.wave_rows;
  }
  ISER_HD uint8_t* rows() const { return base + layout.rows; }
  ISER_HD uint8_t* inner() const { return base + layout.inner; }
  // Scales of 128 columns of all rows.
  ISER_HD float* row_scales(int32_t block) const {
    return reinterpret_cast<float*>(base + layout.row_scales) + block * sizes.held_scales();
  }
  ISER_HD float* inner_scales(int32_t block) const {
    return reinterpret_cast<float*>(base + layout.inner_scales) + block * sizes.held_scales();
  }
};

}  // namespace iser::cuda
