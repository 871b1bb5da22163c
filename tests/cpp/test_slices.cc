// Which device moves which slice: each slice of a row once, whatever the devices and the rule.
#include <cstdio>
#include <set>

#include "ffi/core/slices.h"

namespace iser {
namespace {

int num_failed = 0;

void expect(bool holds, const char* what, int ranks, int devices, uint32_t total) {
  if (holds) return;
  ++num_failed;
  std::printf("FAIL %s: P=%d, devices=%d, slices=%u\n", what, ranks, devices, total);
}

// Every slice by exactly one device; under SAMI by the one that holds its member.
void test_row(int ranks, int devices, const Broadcast& row, uint32_t total) {
  const Group group = row.group(ranks);
  const int per_device = ranks / devices;
  std::multiset<uint32_t> moved;
  for (int d = 0; d < devices; ++d) {
    const Share share = device_share(row, group, d * per_device, per_device);
    for (uint32_t f = share.first; f < share.last; ++f) {
      uint32_t count = 0;
      for (uint32_t j = f; j < total; j += share.step, ++count) {
        moved.insert(j);
        const int mover =
            row.how == 0 ? row.owner : group.begin + static_cast<int>(j) % group.size();
        expect(mover / per_device == d, "a device moves another's slice", ranks, devices, total);
      }
      expect(count == share.count(f, total), "count", ranks, devices, total);
    }
  }
  const bool is_resident = row.how == static_cast<int32_t>(CopyWay::kResident);
  expect(moved.size() == (is_resident ? 0 : total), "slices moved", ranks, devices, total);
  uint32_t next = 0;
  for (uint32_t j : moved) expect(j == next++, "slices in order", ranks, devices, total);
}

void test_shares() {
  for (int ranks : {2, 3, 6, 8, 12, 72}) {
    for (int devices = 1; devices <= ranks; ++devices) {
      if (ranks % devices != 0) continue;
      for (int level = 0; ranks % (1 << level) == 0; ++level) {
        for (int how = 0; how < 3; ++how) {
          for (uint32_t total : {0u, 1u, 3u, 17u, 96u}) {
            const int group_idx = (1 << level) - 1;
            test_row(ranks, devices, {0, ranks / 2, level, group_idx, 0, how}, total);
          }
        }
      }
    }
  }
}

void test_cuts() {
  for (uint64_t source = 0; source < 32; ++source) {
    for (uint64_t target = 0; target < 32; ++target) {
      for (uint64_t bytes = 0; bytes < 70; ++bytes) {
        const PlaneCut cut = cut_plane(source, target, bytes);
        const bool is_inside = cut.head + cut.body <= bytes && cut.body % 16 == 0;
        const bool is_aligned =
            cut.body == 0 || ((source + cut.head) % 16 == 0 && (target + cut.head) % 16 == 0);
        const bool is_short = source % 16 != target % 16 || bytes - cut.body < 31;
        expect(is_inside && is_aligned && is_short, "cut", static_cast<int>(source),
               static_cast<int>(target), static_cast<uint32_t>(bytes));
      }
    }
  }
}

// A bundle's slices, in order, are all bytes of all planes, whatever the planes' sizes.
void test_bundles() {
  for (const WeightFormat format :
       {WeightFormat::kFloat32, WeightFormat::kBFloat16, WeightFormat::kFloat8Block128}) {
    for (const int32_t hidden : {1, 24, 192}) {
      for (const int32_t intermediate : {1, 40, 128}) {
        for (const bool has_biases : {false, true}) {
          const BundleLayout bundle = bundle_layout(format, hidden, intermediate, has_biases);
          for (const uint32_t slice_bytes : {128u, 384u, 1u << 20}) {
            const uint32_t total = num_slices(bundle, slice_bytes);
            uint32_t index = 0;
            for (int32_t plane = 0; plane < bundle.num_planes; ++plane) {
              for (size_t at = 0; at < bundle.planes[plane].bytes;) {
                const PlaneSlice slice = slice_at(bundle, index++, slice_bytes);
                expect(slice.plane == plane && slice.begin == at && slice.bytes > 0 &&
                           slice.bytes <= slice_bytes,
                       "slice of a bundle", hidden, intermediate, slice_bytes);
                at += slice.bytes;
                if (num_failed > 0) return;
              }
            }
            expect(index == total, "slices of a bundle", hidden, intermediate, slice_bytes);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace iser

int main() {
  iser::test_bundles();
  iser::test_shares();
  iser::test_cuts();
  std::printf("%s\n", iser::num_failed == 0 ? "passed" : "failed");
  return iser::num_failed == 0 ? 0 : 1;
}
