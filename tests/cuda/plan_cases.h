// Random cases for the CUDA plan and what the C++ core makes of them; no CUDA in here.
#pragma once

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <initializer_list>
#include <random>
#include <string>
#include <vector>

#include "ffi/core/haloq.h"

namespace iser::cuda {

template <typename T, typename U>
std::string first_difference(const char* what, const T* got, const U* want, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (static_cast<int64_t>(got[i]) == static_cast<int64_t>(want[i])) continue;
    return std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(got[i]) +
           ", should be " + std::to_string(want[i]);
  }
  return "";
}

inline int32_t pick(std::mt19937& rng, std::initializer_list<int32_t> from) {
  return *(from.begin() + rng() % from.size());
}

inline PlanConfig random_config(std::mt19937& rng, int32_t ranks) {
  const int32_t most = 1024 / ranks;
  PlanConfig config{};
  config.slots.num_ranks = ranks;
  config.slots.num_experts = ranks * (rng() % 4 ? 1 + rng() % std::min(most, 48) : most);
  config.slots.num_helper_slots = pick(rng, {0, 1, 2, 3, 3, 4, 4, 5, 8, 16});
  config.min_group_size = pick(rng, {1, 2, 4, 4, 4, 8});
  config.min_routes = rng() % 4 ? 0 : rng() % 200;
  config.gain_threshold = rng() % 5 ? 0 : 1000 + rng() % 800;
  config.copy_rule = static_cast<CopyRule>(rng() % 4 ? 0 : rng() % 3);
  return config;
}

// Under which W10 takes more broadcasts than a word has bits, or than two have.
inline PlanConfig crowded_config(std::mt19937& rng, int32_t ranks) {
  PlanConfig config{};
  config.slots.num_ranks = ranks;
  config.slots.num_experts = ranks * std::min(1024 / ranks, 16 + static_cast<int32_t>(rng() % 33));
  config.slots.num_helper_slots = pick(rng, {4, 8, 16});
  config.min_group_size = pick(rng, {1, 2, 4});
  config.copy_rule = static_cast<CopyRule>(rng() % 3);
  return config;
}

// Weights [P, E] of a workload: W0 balanced, W1 hot experts, W2 hot rank, W3 spread hot, W4 ragged
// sources, W5 a zero expert and a zero rank, W6 a hotspot that rotates, W7 a burst; W9 a source
// that sends all to one expert, its own, so that they go to many hosts; W10 every second rank hot.
inline std::vector<double> workload(std::mt19937& rng, int kind, int32_t ranks, int32_t experts) {
  std::vector<double> weight(static_cast<size_t>(ranks) * experts, 1.0);
  const int32_t home = experts / ranks, at = rng() % ranks, step = rng() % experts;
  for (int32_t s = 0; s < ranks; ++s) {
    for (int32_t e = 0; e < experts; ++e) {
      double& w = weight[static_cast<size_t>(s) * experts + e];
      switch (kind) {
        case 1:
          w = e % 17 == at % 17 ? 20 : 1;
          break;
        case 2:
          w = e / home == at ? 9 : 1;
          break;
        case 3:
          w = e % home == 0 ? 6 : 1;
          break;
        case 4:
          w = (1.0 + s % 5) * (e % 11 == 3 ? 8 : 1);
          break;
        case 5:
          w = e == step || e / home == at ? 0 : 1 + (e % 7 == 1) * 5;
          break;
        case 6:
          w = (e + step) % experts < 1 + experts / 16 ? 15 : 1;
          break;
        case 7:
          w = s == at && e % 5 == 0 ? 40 : 1;
          break;
        case 8:
          w = std::exp(2.0 * std::sin(e * 12.9898 + step) + std::sin(s * 4.1 + e));
          break;
        case 9:
          w = s != at ? 1 : e == at * home;
          break;
        case 10:
          w = e / home % 2 == 0 ? 10 : 1;
          break;
        default:
          break;
      }
    }
  }
  return weight;
}

inline std::string describe(const PlanConfig& c) {
  char text[160];
  std::snprintf(text, sizeof text, "P=%d E=%d S=%d group>=%d routes>=%d gain=%d rule=%d",
                c.slots.num_ranks, c.slots.num_experts, c.slots.num_helper_slots, c.min_group_size,
                c.min_routes, c.gain_threshold, static_cast<int>(c.copy_rule));
  return text;
}

inline std::vector<std::vector<int32_t>> draw_ids(std::mt19937& rng, int kind,
                                                  const PlanConfig& config, size_t num_routes) {
  const int32_t ranks = config.slots.num_ranks, experts = config.slots.num_experts;
  const auto weight = workload(rng, kind, ranks, experts);
  std::vector<std::vector<int32_t>> ids(ranks);
  for (int32_t s = 0; s < ranks; ++s) {
    std::discrete_distribution<int32_t> draw(
        weight.begin() + static_cast<size_t>(s) * experts,
        weight.begin() + (static_cast<size_t>(s) + 1) * experts);
    for (size_t i = 0; i < num_routes; ++i) {
      const uint32_t odd = rng() % 64;
      ids[s].push_back(odd == 0 ? -1 : odd == 1 ? experts : odd == 2 ? INT32_MIN : draw(rng));
    }
  }
  return ids;
}

// Routes by source and expert, [P, E].
inline std::vector<int32_t> count_ids(const PlanConfig& config,
                                      const std::vector<std::vector<int32_t>>& ids) {
  const int32_t experts = config.slots.num_experts;
  std::vector<int32_t> counts(ids.size() * experts, 0);
  for (size_t s = 0; s < ids.size(); ++s) {
    for (int32_t id : ids[s]) {
      if (is_valid_expert(id, experts)) ++counts[s * experts + id];
    }
  }
  return counts;
}

// The C++ core's plan of some counts.
struct CorePlan {
  std::vector<Broadcast> broadcasts;
  std::vector<int32_t> quota, load_before, load;
  int32_t num_broadcasts = 0, target = 0;
  uint64_t hash = 0;

  CorePlan(const PlanConfig& config, const std::vector<int32_t>& counts, const int32_t* resident)
      : broadcasts(config.max_broadcasts()),
        quota(static_cast<size_t>(config.max_broadcasts()) * config.slots.num_ranks),
        load_before(config.slots.num_ranks),
        load(config.slots.num_ranks) {
    std::vector<int64_t> scratch(plan_scratch_bytes(config) / sizeof(int64_t) + 1);
    const PlanView view{broadcasts.data(), quota.data(),    load_before.data(),
                        load.data(),       &num_broadcasts, &target};
    plan_counts(config, counts.data(), resident, plan_scratch(config, scratch.data()), view);
    hash = plan_hash(config, view);
  }
};

// A source's routes rewritten from haloq::source_share, one route after the other.
struct CoreRoutes {
  std::vector<int32_t> route_slot, starts, send;

  CoreRoutes(const PlanConfig& config, const CorePlan& plan, const std::vector<int32_t>& counts,
             const int32_t* ids, size_t num_routes, int32_t source)
      : route_slot(num_routes, -1), starts(config.slots.num_slots() + 1, 0) {
    const SlotSpace& slots = config.slots;
    std::vector<std::vector<int32_t>> where(slots.num_experts);  // by expert: slot of each place
    for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
      const Broadcast& row = plan.broadcasts[b];
      std::vector<int32_t> share(slots.num_ranks);
      source_share(config, counts.data(), row.expert,
                   plan.quota.data() + static_cast<size_t>(b) * slots.num_ranks, source,
                   share.data());
      const auto give = [&](int32_t host) {
        const int32_t slot = host == row.owner ? slots.home_slot(row.expert)
                                               : slots.helper_slot(host, row.helper_idx);
        where[row.expert].insert(where[row.expert].end(), share[host], slot);
      };
      give(source);
      for (int32_t h = 0; h < slots.num_ranks; ++h) {
        if (h != source) give(h);
      }
    }
    std::vector<int32_t> place(slots.num_experts, 0);
    std::vector<std::vector<int32_t>> by_slot(slots.num_slots());
    for (size_t i = 0; i < num_routes; ++i) {
      if (!is_valid_expert(ids[i], slots.num_experts)) continue;
      const auto& list = where[ids[i]];
      route_slot[i] = list.empty() ? slots.home_slot(ids[i]) : list.at(place[ids[i]]++);
      by_slot[route_slot[i]].push_back(i);
    }
    for (int32_t s = 0; s < slots.num_slots(); ++s) {
      starts[s + 1] = starts[s] + by_slot[s].size();
      send.insert(send.end(), by_slot[s].begin(), by_slot[s].end());
    }
  }
};

// Popularity of 384 experts as in the paper's mixed trace (Top-1/2/4/8/16 hold
// 4.69/8.07/13.02/19.92/29.40 %), with a decaying tail; shuffled. Other sizes are cut or repeated.
inline std::vector<double> paper_popularity(int32_t num_experts, std::mt19937& rng) {
  std::vector<double> share;
  for (int i = 0; i < num_experts; ++i) {
    const int at = i % 384;
    share.push_back(at == 0   ? 4.69
                    : at == 1 ? 3.38
                    : at < 4  ? 2.475
                    : at < 8  ? 1.725
                    : at < 16 ? 1.185
                              : 0.9 * std::exp(-(at - 16) / 79.0));
  }
  std::shuffle(share.begin(), share.end(), rng);
  return share;
}

// A slot table [P, S] as a plan of these counts would leave it, partly.
inline std::vector<int32_t> random_table(std::mt19937& rng, const PlanConfig& config,
                                         const std::vector<int32_t>& counts) {
  std::vector<int32_t> table(std::max(config.max_broadcasts(), 1), -1);
  if (config.max_broadcasts() == 0) return table;
  const CorePlan plan(config, counts, nullptr);
  for (int32_t b = 0; b < plan.num_broadcasts; ++b) {
    const Broadcast& row = plan.broadcasts[b];
    const Group group = row.group(config.slots.num_ranks);
    for (int32_t r = group.begin; r < group.end; ++r) {
      if (rng() % 16) table[r * config.slots.num_helper_slots + row.helper_idx] = row.expert;
    }
  }
  return table;
}

}  // namespace iser::cuda
