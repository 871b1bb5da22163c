// Property and fuzz test of ffi/core: random sizes, knobs and counts, every buffer of its exact
// size so that sanitizers see a step beside it.
//
//     test_haloq [first seed] [number of plans]
//
// A failure prints the command that repeats it alone.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "ffi/core/haloq.h"
#include "ffi/core/layout.h"
#include "tests/shapes.h"

namespace {

using namespace iser;

const char* program;

struct Case {
  uint64_t seed;
  PlanConfig config;
  std::vector<int32_t> counts, resident;
  std::vector<Broadcast> broadcasts;
  std::vector<int32_t> quota, load_before, load;
  int32_t num_broadcasts = -7, target = -7;

  PlanView view() {
    return {broadcasts.data(), quota.data(),    load_before.data(),
            load.data(),       &num_broadcasts, &target};
  }
};

[[noreturn]] void fail(const Case& c, const std::string& what) {
  const SlotSpace& s = c.config.slots;
  std::fprintf(stderr,
               "seed %llu (P=%d E=%d S=%d min_group_size=%d min_routes=%d gain_threshold=%d "
               "copy_rule=%d): %s\nrepeat: %s %llu 1\n",
               static_cast<unsigned long long>(c.seed), s.num_ranks, s.num_experts,
               s.num_helper_slots, c.config.min_group_size, c.config.min_routes,
               c.config.gain_threshold, static_cast<int>(c.config.copy_rule), what.c_str(), program,
               static_cast<unsigned long long>(c.seed));
  std::exit(1);
}

void expect(bool ok, const Case& c, const std::string& what) {
  if (!ok) fail(c, what);
}

int32_t random_count(std::mt19937_64& rng, int kind, int32_t limit) {
  switch (kind) {
    case 0:
      return static_cast<int32_t>(rng() % 3);
    case 1:
      return rng() % 10 == 0 ? static_cast<int32_t>(rng() % 100) : 0;
    case 2:
      return static_cast<int32_t>(rng() % (static_cast<uint64_t>(limit) + 1));
    case 3:
      return 0;
    default:
      return std::min(limit, static_cast<int32_t>(1.0 / (1e-6 + (rng() % 100000) / 1e5)));
  }
}

Case make_case(uint64_t seed) {
  std::mt19937_64 rng(seed);
  const auto pick = [&](std::initializer_list<int32_t> values) {
    return values.begin()[rng() % values.size()];
  };
  Case c{seed, {}, {}, {}, {}, {}, {}, {}};
  const int32_t ranks =
      rng() % 2 ? pick({1, 2, 3, 4, 6, 8, 16, 24, 33, 72}) : static_cast<int32_t>(1 + rng() % 72);
  const int32_t home = static_cast<int32_t>(1 + rng() % std::min(1024 / ranks, 12));
  c.config = {{ranks, ranks * home, pick({0, 1, 2, 3, 4, 8, 16})},
              pick({1, 2, 4}),
              pick({0, 0, 1, 7, 100}),
              pick({0, 0, 1050, 2000}),
              static_cast<CopyRule>(rng() % 3)};
  const int kind = static_cast<int>(rng() % 5);
  const int32_t limit = INT32_MAX / (ranks * ranks * home);  // the sum stays below 2^31
  c.counts.resize(static_cast<size_t>(ranks) * ranks * home);
  for (int32_t& count : c.counts) count = random_count(rng, kind, limit);
  c.resident.resize(c.config.max_broadcasts());
  for (int32_t& expert : c.resident) expert = static_cast<int32_t>(rng() % (ranks * home + 1)) - 1;
  // Old contents: whatever is not written shows.
  c.broadcasts.assign(c.config.max_broadcasts(), {-9, -9, -9, -9, -9, -9});
  c.quota.assign(static_cast<size_t>(c.config.max_broadcasts()) * ranks, -9);
  c.load_before.assign(ranks, -9);
  c.load.assign(ranks, -9);
  return c;
}

void run_plan(Case& c, bool with_resident) {
  std::vector<int64_t> scratch((plan_scratch_bytes(c.config) + 7) / 8, -1);
  plan_counts(c.config, c.counts.data(), with_resident ? c.resident.data() : nullptr,
              plan_scratch(c.config, scratch.data()), c.view());
}

int64_t total_of(const Case& c, int32_t expert) {
  int64_t total = 0;
  for (int32_t r = 0; r < c.config.slots.num_ranks; ++r) {
    total += c.counts[static_cast<size_t>(r) * c.config.slots.num_experts + expert];
  }
  return total;
}

// Loads as the quotas say, and what a broadcast must be.
void check_broadcasts(const Case& c) {
  const SlotSpace& s = c.config.slots;
  std::vector<int64_t> load(s.num_ranks, 0);
  std::vector<int32_t> exports(s.num_ranks, 0);
  std::vector<bool> taken(static_cast<size_t>(s.num_ranks) * std::max(1, s.num_helper_slots),
                          false);
  std::vector<bool> exported(s.num_experts, false);
  for (int32_t b = 0; b < c.num_broadcasts; ++b) {
    const Broadcast& row = c.broadcasts[b];
    expect(0 <= row.expert && row.expert < s.num_experts, c, "expert out of range");
    expect(!exported[row.expert], c, "an expert is exported twice");
    exported[row.expert] = true;
    expect(row.owner == s.owner(row.expert), c, "wrong owner");
    ++exports[row.owner];
    expect(0 <= row.helper_idx && row.helper_idx < s.num_helper_slots, c, "helper index");
    expect(0 <= row.how && row.how <= 2, c, "how");
    const Group group = row.group(s.num_ranks);
    int64_t sum = 0;
    for (int32_t r = 0; r < s.num_ranks; ++r) {
      const int32_t quota = c.quota[static_cast<size_t>(b) * s.num_ranks + r];
      expect(quota >= 0, c, "negative quota");
      expect(quota == 0 || group.contains(r) || r == row.owner, c, "quota of a stranger");
      sum += quota;
      load[r] += quota;
      if (!group.contains(r)) continue;
      const size_t slot = static_cast<size_t>(r) * s.num_helper_slots + row.helper_idx;
      expect(!taken[slot], c, "two broadcasts share a slot");
      taken[slot] = true;
    }
    expect(sum == total_of(c, row.expert), c, "quotas do not sum to the expert's total");
  }
  for (int32_t e = 0; e < s.num_experts; ++e) {
    if (!exported[e]) load[s.owner(e)] += total_of(c, e);
  }
  for (int32_t r = 0; r < s.num_ranks; ++r) {
    expect(load[r] == c.load[r], c, "loads are not what the quotas say");
    expect(exports[r] <= std::min(s.num_helper_slots, s.num_home()), c, "too many exports");
  }
}

void check_loads(const Case& c) {
  const SlotSpace& s = c.config.slots;
  int64_t total = 0, hottest = 0;
  for (int32_t r = 0; r < s.num_ranks; ++r) {
    int64_t before = 0;
    for (int32_t h = 0; h < s.num_home(); ++h) before += total_of(c, r * s.num_home() + h);
    expect(before == c.load_before[r], c, "load_before");
    expect(c.load[r] <= std::max<int64_t>(before, c.target), c, "a load grew beyond the level");
    total += before;
    hottest = std::max(hottest, before);
  }
  expect(c.target == (total + s.num_ranks - 1) / s.num_ranks, c, "water level");
  if (s.num_helper_slots == 0 || hottest <= c.target) {
    expect(c.num_broadcasts == 0, c, "a plan where none is due");
  }
}

void check_unused_rows(const Case& c) {
  for (int32_t b = c.num_broadcasts; b < c.config.max_broadcasts(); ++b) {
    const Broadcast& row = c.broadcasts[b];
    expect(row.expert == -1 && row.owner == -1 && row.level == -1 && row.group_idx == -1 &&
               row.helper_idx == -1 && row.how == -1,
           c, "an unused row is not -1");
    for (int32_t r = 0; r < c.config.slots.num_ranks; ++r) {
      expect(c.quota[static_cast<size_t>(b) * c.config.slots.num_ranks + r] == 0, c,
             "unused quota");
    }
  }
}

// Stage 5 as counts: every route of every source goes somewhere, and every quota is filled.
void check_shares(const Case& c) {
  const SlotSpace& s = c.config.slots;
  std::vector<int32_t> share(s.num_ranks);
  std::vector<int64_t> filled(s.num_ranks);
  for (int32_t b = 0; b < c.num_broadcasts; ++b) {
    const int32_t expert = c.broadcasts[b].expert;
    const int32_t* quota = c.quota.data() + static_cast<size_t>(b) * s.num_ranks;
    std::fill(filled.begin(), filled.end(), 0);
    for (int32_t source = 0; source < s.num_ranks; ++source) {
      std::fill(share.begin(), share.end(), -9);
      source_share(c.config, c.counts.data(), expert, quota, source, share.data());
      int64_t sent = 0;
      for (int32_t r = 0; r < s.num_ranks; ++r) {
        expect(share[r] >= 0, c, "negative share");
        sent += share[r];
        filled[r] += share[r];
      }
      const int32_t own = c.counts[static_cast<size_t>(source) * s.num_experts + expert];
      expect(sent == own, c, "a source's routes are not conserved");
      expect(share[source] == std::min(own, quota[source]), c, "routes leave a host with quota");
    }
    for (int32_t r = 0; r < s.num_ranks; ++r) {
      expect(filled[r] == quota[r], c, "a quota is not filled");
    }
  }
}

void check_again(Case& c) {
  const uint64_t hash = plan_hash(c.config, c.view());
  Case again = make_case(c.seed);
  run_plan(again, false);
  expect(plan_hash(again.config, again.view()) == hash, c, "the same counts, another plan");
  expect(again.quota == c.quota && again.load == c.load, c, "the same counts, other quotas");
  if (c.num_broadcasts > 0) {
    ++again.quota[0];
    expect(plan_hash(again.config, again.view()) != hash, c, "the hash misses a quota");
    --again.quota[0];
    ++again.broadcasts[c.num_broadcasts - 1].helper_idx;
    expect(plan_hash(again.config, again.view()) != hash, c, "the hash misses a slot");
  }
  Case held = make_case(c.seed);
  run_plan(held, true);
  expect(held.quota == c.quota, c, "residency changes quotas");
  for (int32_t b = 0; b < held.num_broadcasts; ++b) {
    const Group group = held.broadcasts[b].group(c.config.slots.num_ranks);
    bool all = true;
    for (int32_t r = group.begin; r < group.end; ++r) {
      all &= held.resident[static_cast<size_t>(r) * c.config.slots.num_helper_slots +
                           held.broadcasts[b].helper_idx] == held.broadcasts[b].expert;
    }
    const bool is_resident = held.broadcasts[b].how == static_cast<int32_t>(CopyWay::kResident);
    expect(is_resident == all, c, "residency");
  }
}

void check_layout() {
  for (int32_t slots : {0, 1, 16}) {
    for (int32_t tokens : {0, 1, 77}) {
      const DomainShape shape = make_shape({3, 9, slots}, 2, 5, 7, tokens, 2, 2, slots);
      const BlockLayout layout = block_layout(shape);
      for (int i = 0; i < kNumSections; ++i) {
        const size_t next = i + 1 < kNumSections ? layout.offset[i + 1] : layout.total;
        const bool fits = layout.guard(i) + kGuardBytes <= next;
        if (layout.offset[i] % kBlockAlign || !fits) {
          std::fprintf(stderr, "section %d of the block overlaps the next\n", i);
          std::exit(1);
        }
      }
      if (segment_bytes(shape, 4) < 4 * layout.total) std::exit(1);
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  program = argv[0];
  const uint64_t first = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : std::random_device{}();
  const uint64_t count = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1500;
  int64_t broadcasts = 0;
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Case c = make_case(seed);
    run_plan(c, false);
    check_loads(c);
    check_broadcasts(c);
    check_unused_rows(c);
    check_shares(c);
    check_again(c);
    broadcasts += c.num_broadcasts;
  }
  check_layout();
  if (count > 100 && broadcasts == 0) return std::fprintf(stderr, "nothing was planned\n"), 1;
  std::printf("haloq: %llu plans from seed %llu, %lld broadcasts\n",
              static_cast<unsigned long long>(count), static_cast<unsigned long long>(first),
              static_cast<long long>(broadcasts));
  return 0;
}
