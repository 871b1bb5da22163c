// The schedule of a fused MoE layer: every row in one tile of each product and column, tiles in an
// order that cannot deadlock, within the workspace's limits; whatever the routing and the waves.
#include <algorithm>
#include <cstdio>
#include <random>
#include <vector>

#include "ffi/cuda/moe_schedule.cuh"

namespace iser::cuda {
namespace {

int num_failed = 0;

struct Case {
  MoeSizes sizes;
  std::vector<int32_t> run_first;
  int32_t lag;

  void expect(bool holds, const char* what, int64_t value) const {
    if (holds) return;
    if (++num_failed > 20) return;
    std::printf("FAIL %s (%lld): slots=%d+%d ranks=%d rows=%d wave=%d tile=%d lag=%d\n", what,
                static_cast<long long>(value), sizes.slots.num_home(), sizes.slots.num_helper_slots,
                sizes.slots.num_ranks, run_first.back(), sizes.wave_rows, sizes.tile.rows, lag);
  }
};

Case random_case(std::mt19937& rng) {
  constexpr int32_t kRows[] = {64, 128, 256};
  Case c{};
  const int32_t ranks = 1 + rng() % 9, home = 1 + rng() % 12;
  c.sizes.slots = {ranks, ranks * home, static_cast<int32_t>(rng() % 4)};
  c.sizes.hidden = 8 * (1 + rng() % 160);
  c.sizes.intermediate = 8 * (1 + rng() % 160);
  c.sizes.element_bytes = 2;
  c.sizes.ranks_per_device = 1 + rng() % ranks;
  c.sizes.tile = {kRows[rng() % 3], 96, 192};
  if (rng() % 3 == 0) c.sizes.tile = {64, 64, 64};
  c.sizes.cluster_size = 1 + rng() % 2;
  c.sizes.chunk_blocks = chunk_blocks(c.sizes, 1 + rng() % 140);
  const int32_t most = rng() % 3 == 0 ? 3 : rng() % 2 ? 200 : 9000;
  c.run_first.push_back(0);
  for (int32_t run = 0; run < c.sizes.num_runs(); ++run) {
    const int32_t rows = rng() % 4 ? rng() % most : 0;
    c.run_first.push_back(c.run_first.back() + rows);
  }
  const int32_t rows = c.run_first.back();
  c.sizes.top_k = 1;
  c.sizes.num_tokens = ceil_div(rows, ranks);
  c.sizes.wave_rows = rng() % 2 ? at_least(rows, 1) : 1 + rows / (1 + rng() % 7);
  c.lag = rng() % 3 ? rng() % 400 : 0;
  return c;
}

void check(const Case& c) {
  const MoeSizes& sizes = c.sizes;
  const int32_t ranks = sizes.slots.num_ranks, stride = sizes.slots.stride();
  const ScheduleLimits limits(sizes);
  std::vector<int32_t> slot_first;
  for (int32_t slot = 0; slot <= stride; ++slot) slot_first.push_back(c.run_first[slot * ranks]);
  std::vector<Segment> segments(limits.segments + 1);
  std::vector<int32_t> first_block(limits.groups + 1, -1), wave_tiles(limits.waves + 1, -7);
  segments.back().first_item = wave_tiles.back() = first_block.back() = -77;
  const ScheduleHead head = build_schedule(sizes, slot_first.data(), c.lag, segments.data(),
                                           first_block.data(), wave_tiles.data());
  c.expect(head.num_rows == c.run_first.back(), "rows", head.num_rows);
  const int32_t most = limits.num_segments(sizes.chunk_blocks);
  c.expect(head.num_segments <= most && most <= limits.segments, "segments", head.num_segments);
  c.expect(wave_tiles.back() == -77 && first_block.back() == -77, "limits", 0);

  // What has come before an item: rows of each wave's tiles, by block.
  std::vector<int32_t> inner_done(limits.blocks, 0), hidden_done(limits.waves, 0);
  std::vector<int32_t> rows_of(limits.blocks, -1);
  std::vector<int32_t> covered(head.num_rows, 0);
  int32_t item = 0, last_home = -1, first_helper = INT32_MAX, rows_seen = 0;
  for (int32_t s = 0; s < head.num_segments; ++s) {
    const Segment& segment = segments[s];
    c.expect(segment.first_item == item, "numbers", item);
    const bool is_inner = segment.gemm == Gemm::kInner;
    const int32_t columns = is_inner ? sizes.inner_tiles() : sizes.hidden_tiles();
    for (int32_t i = 0; i < segment.num_blocks * sizes.items(segment.gemm); ++i, ++item) {
      const Tile tile = tile_of(sizes, segment, item);
      c.expect(tile.block >= 0 && tile.block < limits.blocks, "block", tile.block);
      c.expect(tile.num_rows > 0 && tile.num_rows <= sizes.tile.rows, "tile", tile.num_rows);
      c.expect(tile.column < columns && tile.slot == segment.slot, "column", tile.column);
      const int32_t wave = tile.row / sizes.wave_rows;
      c.expect(wave == tile.wave && (tile.row + tile.num_rows - 1) / sizes.wave_rows == wave,
               "wave", tile.wave);
      c.expect(tile.row >= slot_first[tile.slot] &&
                   tile.row + tile.num_rows <= slot_first[tile.slot + 1],
               "slot", tile.slot);
      for (int32_t w = 0; w < wave; ++w) {
        c.expect(hidden_done[w] == wave_tiles[w], "a wave before the last has ended", item);
      }
      if (is_inner) {
        c.expect(rows_of[tile.block] < 0 || rows_of[tile.block] == tile.num_rows, "rows", item);
        rows_of[tile.block] = tile.num_rows;
        inner_done[tile.block] += at_most(columns - tile.column, sizes.cluster_size);
        if (tile.column == 0) {
          for (int32_t row = tile.row; row < tile.row + tile.num_rows; ++row) {
            const int32_t block = block_of(sizes, first_block.data(), tile.slot,
                                           slot_first[tile.slot], slot_first[tile.slot + 1], row);
            c.expect(block == tile.block, "block of a row", row);
            ++covered[row];
          }
          rows_seen += tile.num_rows;
        }
      } else {
        c.expect(inner_done[tile.block] == sizes.inner_tiles(), "h comes first", item);
        hidden_done[tile.wave] += at_most(columns - tile.column, sizes.cluster_size);
      }
      const bool is_helper = tile.slot >= sizes.slots.num_home();
      if (wave == 0 && is_helper) first_helper = at_most(first_helper, item);
      if (wave == 0 && !is_helper) last_home = item;
      c.expect(is_helper == (item >= head.num_home_items), "home items", item);
    }
  }
  c.expect(item == head.num_items, "items", item);
  c.expect(last_home < first_helper, "home tiles come first", last_home);
  c.expect(rows_seen == head.num_rows, "rows in tiles", rows_seen);
  c.expect(std::count(covered.begin(), covered.end(), 1) == head.num_rows, "each row once", 0);
  int64_t hidden = 0;
  for (int32_t w = 0; w <= (head.num_rows - 1) / sizes.wave_rows && head.num_rows > 0; ++w) {
    c.expect(hidden_done[w] == wave_tiles[w], "tiles of a wave", w);
    hidden += hidden_done[w];
  }
  int64_t blocks = 0;
  for (int32_t rows : rows_of) blocks += rows > 0;
  c.expect(hidden == blocks * sizes.hidden_tiles(), "every block in each column", hidden);

  for (int32_t run = 0; run < sizes.num_runs(); ++run) {
    for (int32_t row : {c.run_first[run], c.run_first[run + 1] - 1}) {
      if (c.run_first[run] == c.run_first[run + 1]) continue;
      c.expect(run_of(c.run_first.data(), sizes.num_runs(), row) == run, "run of a row", row);
    }
  }
}

// Sections of the workspace lie apart, aligned, and within its size.
void check_workspace(const Case& c) {
  const MoeSizes& sizes = c.sizes;
  const MoeLayout layout(sizes);
  const MoeWorkspace workspace{sizes, layout, nullptr};
  const auto at = [](const void* pointer) { return reinterpret_cast<size_t>(pointer); };
  size_t end = sizeof(DeviceWords);
  const auto place = [&](const void* begin, size_t bytes, size_t alignment, const char* what) {
    c.expect(at(begin) >= end && at(begin) % alignment == 0, what, at(begin));
    end = at(begin) + bytes;
  };
  for (int32_t v = 0; v < sizes.ranks_per_device; ++v) {
    const RankCounters counters = workspace.counters(v);
    place(counters.next_item, 4, kCounterLine, "next_item");
    place(counters.next_row, 4, kCounterLine, "next_row");
    place(counters.hidden_done, 4 * size_t(layout.limits.waves), 4, "hidden_done");
    place(counters.rows_done, 4 * size_t(layout.limits.blocks), 4, "rows_done");
    place(counters.inner_done, 4 * size_t(layout.limits.blocks), 4, "inner_done");
  }
  c.expect(end <= layout.tables, "counters are zeroed", end);
  for (int32_t v = 0; v < sizes.ranks_per_device; ++v) {
    const RankTables tables = workspace.tables(v);
    place(tables.head, sizeof(ScheduleHead), 16, "head");
    place(tables.run_first, 4 * size_t(sizes.num_runs() + 1), 4, "run_first");
    place(tables.run_start, 4 * size_t(sizes.num_runs()), 4, "run_start");
    place(tables.first_block, 4 * size_t(layout.limits.groups), 4, "first_block");
    place(tables.wave_tiles, 4 * size_t(layout.limits.waves), 4, "wave_tiles");
    place(tables.segments, sizeof(Segment) * layout.limits.segments, 32, "segments");
    place(tables.sources, sizeof(RowSource) * sizes.wave_rows, 8, "sources");
  }
  for (int32_t v = 0; v < sizes.ranks_per_device; ++v) {
    for (int32_t i = 0; i < 2; ++i) place(workspace.map(v, i), kMapBytes, 64, "map");
  }
  const size_t held = size_t(sizes.ranks_per_device) * sizes.wave_rows;
  place(workspace.rows(), held * sizes.hidden * sizes.element_bytes, 128, "rows");
  place(workspace.inner(), held * sizes.intermediate * sizes.element_bytes, 128, "inner");
  c.expect(end <= layout.total, "total", end);
}

void check_units() {
  MoeSizes sizes{};
  for (sizes.hidden = 8; sizes.hidden < 2000; sizes.hidden += 8) {
    for (int32_t columns : {64, 192}) {
      sizes.tile.hidden = columns;
      int32_t units = 0;
      for (int32_t i = 0; i < sizes.hidden_tiles(); ++i) units += tile_units(sizes, i);
      if (units == sizes.units_per_route()) continue;
      ++num_failed;
      std::printf("FAIL units of %d columns by %d: %d\n", sizes.hidden, columns, units);
    }
  }
}

}  // namespace
}  // namespace iser::cuda

int main() {
  std::mt19937 rng(1);
  for (int i = 0; i < 300; ++i) {
    const iser::cuda::Case c = iser::cuda::random_case(rng);
    iser::cuda::check(c);
    iser::cuda::check_workspace(c);
  }
  iser::cuda::check_units();
  std::printf("%d failed\n", iser::cuda::num_failed);
  return iser::cuda::num_failed == 0 ? 0 : 1;
}
