// The plan kernel's code on a CPU (tests/cuda/simt), one CTA a rank, against the C++ core: what can
// be shown of it without a GPU. Prints a line a case.
//
//   g++ -std=c++17 -O2 -Itests/cuda/simt -I. tests/cuda/test_plan_simt.cc && ./a.out [cases] [seed]
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>

#include "ffi/cuda/plan_derive.cuh"
#include "ffi/cuda/plan_rewrite.cuh"
#include "tests/cuda/plan_cases.h"

using namespace iser;
using namespace iser::cuda;

namespace {

constexpr unsigned kThreads = 96;  // three warps: one places, up to one repairs

struct NoStamps {
  void mark(PlanStamp) const {}
};

std::string check(std::mt19937& rng, int kind, const PlanConfig& config,
                  int32_t* num_broadcasts_wanted = nullptr) {
  const int32_t ranks = config.slots.num_ranks;
  const int32_t experts = config.slots.num_experts, rows = config.max_broadcasts();
  const size_t routes = rng() % 400;
  const auto ids = draw_ids(rng, kind, config, routes);
  const auto counts = count_ids(config, ids);
  const std::vector<int32_t> table = random_table(rng, config, counts);
  const int32_t* resident = rng() % 4 ? nullptr : table.data();
  const CorePlan want(config, counts, resident);
  if (num_broadcasts_wanted != nullptr) *num_broadcasts_wanted = want.num_broadcasts;

  Carver sizes{nullptr, 0};
  PlanArrays plan{};
  RewriteArrays rewrite{};
  carve_plan(config, sizes, plan);
  carve_rewrite(config, kThreads / 32, sizes, rewrite);
  // Half of the time the source with the most routes to one expert: their runs are the most.
  const auto busiest = std::max_element(counts.begin(), counts.end()) - counts.begin();
  const int32_t source = rng() % 2 ? rng() % ranks : busiest / experts;
  std::vector<Broadcast> broadcasts(rows);
  std::vector<int32_t> quota(static_cast<size_t>(rows) * ranks, -7), load_before(ranks),
      load(ranks);
  std::vector<int32_t> route_slot(routes, -7), send(routes, -7);
  int32_t num_broadcasts = -7;
  std::vector<uint8_t> memory(sizes.used + 16, 0xcd);
  std::vector<int32_t> copy(static_cast<size_t>(ranks) * copy_stride(experts));
  std::vector<int32_t> warp_counts(kThreads / 32 * experts, 0), cta_counts(experts);
  std::vector<int32_t> before_cta(experts, 0);
  std::vector<uint32_t> packed(routes);
  std::vector<uint16_t> ordered(routes + 1);
  std::vector<int32_t> order_first(experts);
  int32_t num_ordered = 0;
  const ExpertOrder order{order_first.data(), &num_ordered, rng() % 4 ? ordered.data() : nullptr};
  uint8_t* base = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
  Carver carver{base, 0};
  carve_plan(config, carver, plan);
  carve_rewrite(config, kThreads / 32, carver, rewrite);
  *plan.hash = 0;
  int32_t* const copy_to = rng() % 2 ? copy.data() : nullptr;

  const bool on_warp = ranks <= 32 && rng() % 4;
  simt::run(kThreads, [&] {
    const RouteRange range = RouteRange::of(routes, 0, 1);
    rank_in_warp(ids[source].data(), range, experts, warp_counts.data(), packed.data());
    __syncthreads();
    sum_warps(experts, warp_counts.data(), cta_counts.data());
    __syncthreads();
    finish_places(range, experts, warp_counts.data(), before_cta.data(), packed.data());
    uint64_t hash = 0;
    const auto beside_place = [&](int32_t first) {
      start_rewrite(config, plan, rewrite, source, first);
      if (warp_index() == 1) {
        order_experts(experts, cta_counts.data(), before_cta.data(), order);
      }
    };
    const auto use_row = [&](int32_t b) {
      write_row(config, plan, b, resident, broadcasts.data(), hash);
    };
    if (on_warp) {
      derive<true>(config, counts.data(), plan, copy_to, NoStamps{}, beside_place, use_row);
    } else {
      derive<false>(config, counts.data(), plan, copy_to, NoStamps{}, beside_place, use_row);
    }
    share_out(config, plan, rewrite, source);
    write_loads(config, plan, hash, load_before.data(), load.data(), &num_broadcasts);
    __syncthreads();
    scan_slots(config.slots.num_slots(), rewrite);
    spread_starts(config, plan, rewrite);
    rewrite_routes(rewrite, range, order, packed.data(), route_slot.data(), send.data());
    __syncthreads();
    if (order.routes) store_ordered(range, order, packed.data(), send.data());
    write_quota(config, plan, quota.data(), 0, 1);
  });

  const CoreRoutes core(config, want, counts, ids[source].data(), routes, source);
  std::string why;
  const auto compare = [&](const char* what, const auto* got, const auto* expected, size_t count) {
    if (why.empty()) why = first_difference(what, got, expected, count);
  };
  compare("num_broadcasts", &num_broadcasts, &want.num_broadcasts, 1);
  compare("target", &plan.scalars[kTarget], &want.target, 1);
  compare("load_before", load_before.data(), want.load_before.data(), ranks);
  compare("load", load.data(), want.load.data(), ranks);
  compare("broadcasts", reinterpret_cast<const int32_t*>(broadcasts.data()),
          reinterpret_cast<const int32_t*>(want.broadcasts.data()), rows * 6);
  compare("quota", quota.data(), want.quota.data(), quota.size());
  compare("hash", plan.hash, &want.hash, 1);
  compare("route_slot", route_slot.data(), core.route_slot.data(), routes);
  compare("send starts", rewrite.slot_start, core.starts.data(), core.starts.size());
  compare("send routes", send.data(), core.send.data(), core.send.size());
  return why.empty() ? "" : describe(config) + ", source " + std::to_string(source) + ": " + why;
}

// More broadcasts than the warp's masks have bits in their first half, and than it takes at all.
std::string check_crowded(int seed) {
  std::mt19937 rng(seed);
  int32_t above_32 = 0, above_64 = 0;
  for (int i = 0; i < 24; ++i) {
    int32_t broadcasts = 0;
    const std::string why =
        check(rng, 10, crowded_config(rng, pick(rng, {16, 24, 32})), &broadcasts);
    if (!why.empty()) return why;
    above_32 += broadcasts > 32 && broadcasts <= 64;
    above_64 += broadcasts > 64;
  }
  return above_32 > 3 && above_64 > 3 ? "" : "few plans are so";
}

}  // namespace

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 10, seed = argc > 2 ? std::atoi(argv[2]) : 1;
  int passed = 0, failed = 0;
  for (int32_t ranks : {1, 2, 3, 4, 5, 7, 8, 16, 17, 24, 31, 32, 33, 72}) {
    std::mt19937 rng(seed * 1000 + ranks);
    std::string first;
    int bad = 0;
    for (int i = 0; i < cases; ++i) {
      const std::string why = check(rng, (i + ranks) % 10, random_config(rng, ranks));
      if (!why.empty() && bad++ == 0) first = "case " + std::to_string(i) + " (" + why + ")";
    }
    (bad == 0 ? passed : failed)++;
    std::printf("%s P=%d, %d cases%s%s\n", bad == 0 ? "ok  " : "FAIL", ranks, cases,
                bad == 0 ? "" : ": first ", first.c_str());
    std::fflush(stdout);
  }
  const std::string why = check_crowded(seed);
  (why.empty() ? passed : failed)++;
  std::printf("%s plans of more than 32 and 64 broadcasts%s%s\n", why.empty() ? "ok  " : "FAIL",
              why.empty() ? "" : ": ", why.c_str());
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 ? 0 : 1;
}
