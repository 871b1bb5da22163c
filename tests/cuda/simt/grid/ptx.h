// What the PTX of the sources does. The text is read: operands are those that it numbers.
#pragma once

#include <array>

#include "ffi/core/fp8.h"

namespace simt {

struct Operand {
  uint64_t bits;  // of an input
  void* out;      // of an output
};

template <typename T>
Operand in(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return {bits, nullptr};
}
template <typename T>
Operand out(T& value) {
  return {0, &value};
}
template <typename T>
Operand inout(T& value) {
  return {0, &value};
}

// The numbers behind % in the text, in order.
inline std::vector<int> numbered(const std::string& text) {
  std::vector<int> numbers;
  for (size_t i = 0; i + 1 < text.size(); ++i) {
    if (text[i] == '%' && text[i + 1] >= '0' && text[i + 1] <= '9') {
      numbers.push_back(std::atoi(text.c_str() + i + 1));
    }
  }
  return numbers;
}

inline bool has(const std::string& text, const char* word) {
  return text.find(word) != std::string::npos;
}

// As the encoder of cuda.h fills it.
struct TensorMap {
  uint8_t* base;
  uint64_t size[3], stride[3];  // strides in bytes; of dimension 0 the element's
  uint32_t box[3], rank;
  bool is_swizzled;
};

inline uint32_t swizzled(uint32_t address) { return address ^ (address >> 7 & 7) << 4; }

// Aborts where the hardware raises an error, or would place the box otherwise than land_box.
inline void check_box(const TensorMap& map, uint32_t shared, const std::vector<int32_t>& at) {
  const uint64_t row_bytes = map.box[0] * map.stride[0];
  const int64_t first_byte = static_cast<int64_t>(at[0]) * static_cast<int64_t>(map.stride[0]);
  const bool ok = map.is_swizzled ? shared % 1024 == 0 && row_bytes == 128
                                  : shared % 128 == 0 && map.box[1] == 1 && first_byte % 16 == 0;
  if (ok) return;
  std::fprintf(stderr, "simt: %s box at %u of rows of %llu bytes from byte %lld on\n",
               map.is_swizzled ? "swizzled" : "plain", shared,
               static_cast<unsigned long long>(row_bytes), static_cast<long long>(first_byte));
  std::abort();
}

// A box of 128-byte rows, swizzled, or one row as it is; zero where the tensor ends.
inline void land_box(const TensorMap& map, uint32_t shared, const std::vector<int32_t>& at) {
  check_box(map, shared, at);
  const size_t bytes = map.stride[0];
  for (uint32_t row = 0; row < map.box[1]; ++row) {
    const uint64_t y = at[1] + row, z = map.rank == 3 ? at[2] : 0;
    const bool is_inside = y < map.size[1] && (map.rank == 2 || z < map.size[2]);
    for (uint32_t c = 0; c < map.box[0]; ++c) {
      const uint64_t x = at[0] + c;
      uint32_t element = 0;
      if (is_inside && x < map.size[0]) {
        std::memcpy(&element, map.base + z * map.stride[2] + y * map.stride[1] + x * bytes, bytes);
      }
      const uint32_t to = shared + row * 128 + c * bytes;
      std::memcpy(from_shared(map.is_swizzled ? swizzled(to) : to), &element, bytes);
    }
  }
}

inline float bf16_at(uint32_t address) {
  uint16_t bits;
  std::memcpy(&bits, from_shared(swizzled(address)), 2);
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}

inline float e4m3_at(uint32_t address) {
  static const std::array<float, 256> values = [] {
    std::array<float, 256> all;
    for (int code = 0; code < 256; ++code) all[code] = iser::fp8::from_e4m3(code);
    return all;
  }();
  return values[*from_shared(swizzled(address))];
}

// One operand element as its descriptor places it.
inline float operand_at(const MmaShape& shape, uint64_t descriptor, uint32_t row, uint32_t k) {
  const uint32_t start = (descriptor & 0x3fff) << 4;
  const uint32_t stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) {
    std::fprintf(stderr, "simt: descriptor without the 128-byte swizzle\n");
    std::abort();
  }
  const uint32_t at = start + row / 8 * stride + row % 8 * 128;
  return shape.is_fp8 ? e4m3_at(at + k) : bf16_at(at + k * 2);
}

inline void multiply(const Mma& mma) {
  static thread_local float a[64][kMostDepth], b[kMostColumns][kMostDepth];
  const MmaShape& shape = mma.shape;
  for (int k = 0; k < shape.depth; ++k) {
    for (int row = 0; row < 64; ++row) a[row][k] = operand_at(shape, mma.a, row, k);
    for (int row = 0; row < shape.columns; ++row) b[row][k] = operand_at(shape, mma.b, row, k);
  }
  for (int t = 0; t < 128; ++t) {
    for (int i = 0; i < shape.num_acc(); ++i) {
      const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8;
      const int column = i / 4 * 8 + t % 4 * 2 + i % 2;
      float& d = *mma.accumulators[t * shape.num_acc() + i];
      float sum = mma.adds ? d : 0.0f;
      for (int k = 0; k < shape.depth; ++k) sum += a[row][k] * b[column][k];
      d = sum;
    }
  }
}

// Operands are whether it adds, the accumulators, both descriptors.
inline void issue_mma(const MmaShape& shape, const std::vector<Operand>& operands,
                      const std::vector<int>& order) {
  WarpGroup& group = cta->groups[threadIdx.x / 128];
  const int count = shape.num_acc();
  group.accumulators.resize(128 * count);
  for (int i = 0; i < count; ++i) {
    group.accumulators[threadIdx.x % 128 * count + i] =
        static_cast<float*>(operands[order[1 + i]].out);
  }
  if (group.meeting.arrived == 127) {
    group.open.push_back({shape, group.accumulators, operands[order[1 + count]].bits,
                          operands[order[2 + count]].bits, operands[order[0]].bits != 0});
  }
  meet(group.meeting, 128);
}

inline void end_mma(uint32_t pending) {
  WarpGroup& group = cta->groups[threadIdx.x / 128];
  while (group.groups.size() > pending) {
    for (const Mma& mma : group.groups.front()) multiply(mma);
    group.groups.pop_front();
  }
}

inline void store_matrix(const std::vector<Operand>& operands, const std::vector<int>& order) {
  uint64_t* own = &cta->stores[threadIdx.x * 5];
  for (int i = 0; i < 5; ++i) own[i] = operands[order[i]].bits;
  __syncwarp();
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32 * 32;
  for (unsigned m = 0; m < 4; ++m) {
    const uint32_t row = static_cast<uint32_t>(cta->stores[(warp + 8 * m + lane / 4) * 5]);
    const uint32_t word = static_cast<uint32_t>(own[1 + m]);
    if (row % 16 != 0) std::abort();
    std::memcpy(from_shared(row) + lane % 4 * 4, &word, 4);
  }
  __syncwarp();
}

inline void barrier_op(const std::string& text, const std::vector<uint64_t>& v) {
  const uint32_t address = static_cast<uint32_t>(v[0]);
  Barrier& barrier = cta_of(address).barriers[address % kPeerBase];
  if (has(text, "init")) {
    barrier = {};
    barrier.count = barrier.pending = static_cast<uint32_t>(v[1]);
    return;
  }
  if (barrier.pending == 0) {
    std::fprintf(stderr, "simt: more arrivals at a barrier than it counts\n");
    std::abort();
  }
  if (has(text, "expect_tx")) barrier.bytes += v[1];
  --barrier.pending;
  barrier.settle();
}

inline void land_later(Cta& c, const TensorMap& map, uint32_t shared, uint32_t barrier,
                       const std::vector<int32_t>& at) {
  c.landing.push_back([=] {
    land_box(map, shared, at);
    uint64_t bytes = map.stride[0];
    for (uint32_t i = 0; i < map.rank; ++i) bytes *= map.box[i];
    cta->barriers[barrier].bytes -= bytes;
    cta->barriers[barrier].settle();
  });
}

// Of [to], [map, {coordinates}], [barrier], and the CTAs of the cluster that get it.
inline void tensor_copy(std::vector<uint64_t> v, bool is_multicast) {
  const uint64_t ctas = is_multicast ? v.back() : 0;
  if (is_multicast) v.pop_back();
  TensorMap map;
  std::memcpy(&map, reinterpret_cast<const void*>(v[1]), sizeof map);
  const uint32_t shared = static_cast<uint32_t>(v[0]), barrier = static_cast<uint32_t>(v.back());
  std::vector<int32_t> at;
  for (size_t i = 2; i + 1 < v.size(); ++i) at.push_back(static_cast<int32_t>(v[i]));
  for (size_t r = 0; r < cta->cluster->size(); ++r) {
    const bool is_target = is_multicast ? (ctas >> r & 1) != 0 : r == cta->rank;
    if (is_target) land_later(*cta->cluster->at(r), map, shared, barrier, at);
  }
}

// Of [to], [from], bytes, [barrier].
inline void bulk_copy(const std::vector<uint64_t>& v) {
  const uint32_t shared = static_cast<uint32_t>(v[0]), barrier = static_cast<uint32_t>(v[3]);
  const uint8_t* const from = reinterpret_cast<const uint8_t*>(v[1]);
  const uint64_t bytes = v[2];
  if (shared % 16 != 0 || v[1] % 16 != 0 || bytes % 16 != 0 || bytes == 0) {
    std::fprintf(stderr, "simt: a bulk copy of %llu bytes that are not whole words\n",
                 static_cast<unsigned long long>(bytes));
    std::abort();
  }
  cta->landing.push_back([=] {
    std::memcpy(from_shared(shared), from, bytes);
    cta->barriers[barrier].bytes -= bytes;
    cta->barriers[barrier].settle();
  });
}

// One f32 operation of its operands, none of which is numbered twice.
inline bool float_op(const std::string& text, const std::vector<Operand>& operands) {
  const auto f = [&](int i) { return __uint_as_float(static_cast<uint32_t>(operands[i].bits)); };
  const auto give = [&](float value) {
    *static_cast<float*>(operands[0].out) = value;
    return true;
  };
  if (has(text, "ex2.approx")) return give(std::exp2(f(1)));
  if (has(text, "rcp.approx")) return give(1.0f / f(1));
  const bool is_min = has(text, "min.NaN.f32");
  if (!is_min && !has(text, "max.NaN.f32")) return false;
  if (f(1) != f(1) || f(2) != f(2)) return give(NAN);
  return give(is_min ? std::fmin(f(1), f(2)) : std::fmax(f(1), f(2)));
}

inline void ptx(const std::string& text, const std::vector<Operand>& operands) {
  const std::vector<int> order = numbered(text);
  std::vector<uint64_t> v;
  for (int i : order) v.push_back(operands.at(i).bits);
  const auto word = [&](int i) { return reinterpret_cast<uint32_t*>(v.at(i)); };
  if (has(text, "ld.acquire") || has(text, "ld.relaxed")) {
    yield();
    *static_cast<uint32_t*>(operands[order[0]].out) = __atomic_load_n(word(1), __ATOMIC_SEQ_CST);
  } else if (text.rfind("st.release", 0) == 0 || text.rfind("st.relaxed", 0) == 0) {
    __atomic_store_n(word(0), static_cast<uint32_t>(v.at(1)), __ATOMIC_SEQ_CST);
  } else if (text.rfind("red.", 0) == 0) {
    __atomic_fetch_add(word(0), static_cast<uint32_t>(v.at(1)), __ATOMIC_SEQ_CST);
  } else if (text.rfind("atom.acq_rel", 0) == 0) {
    *static_cast<uint32_t*>(operands[order[0]].out) =
        __atomic_fetch_add(word(1), 1u, __ATOMIC_SEQ_CST);
  } else if (has(text, "%globaltimer")) {
    *static_cast<uint64_t*>(operands[0].out) = clock64();
  } else if (has(text, "try_wait")) {
    // "mbarrier.try_wait.parity p, [%1], %2" then "selp %0".
    const bool is_over = cta->barriers[static_cast<uint32_t>(v.at(0))].parity != v.at(1);
    if (!is_over) yield();
    *static_cast<uint32_t*>(operands[order[2]].out) = is_over;
  } else if (has(text, "mbarrier")) {
    has(text, "fence")                  ? void()
    : has(text, "cp.async.bulk.tensor") ? tensor_copy(v, has(text, "multicast"))
    : has(text, "cp.async")             ? bulk_copy(v)
                                        : barrier_op(text, v);
    if (has(text, "cp.async") || has(text, "fence")) return;
  } else if (has(text, "m64n192k16.f32.bf16.bf16")) {
    issue_mma({192, 16, false}, operands, order);
  } else if (has(text, "m64n128k32.f32.e4m3.e4m3")) {
    issue_mma({128, 32, true}, operands, order);
  } else if (has(text, "cvt.rn.satfinite.e4m3x2.f32")) {
    // The first input goes to the high byte.
    const auto code = [&](int i) {
      return iser::fp8::to_e4m3(__uint_as_float(static_cast<uint32_t>(v.at(i))));
    };
    *static_cast<uint16_t*>(operands[order[0]].out) = code(2) | code(1) << 8;
  } else if (has(text, "wgmma.commit")) {
    WarpGroup& group = cta->groups[threadIdx.x / 128];
    meet(group.meeting, 128);
    if (threadIdx.x % 128 == 0) group.groups.push_back(std::move(group.open)), group.open.clear();
    meet(group.meeting, 128);
  } else if (has(text, "wgmma.wait_group")) {
    __syncwarp();
    end_mma(static_cast<uint32_t>(v.at(0)));
    __syncwarp();
  } else if (has(text, "stmatrix")) {
    store_matrix(operands, order);
  } else if (has(text, "tensormap.replace")) {
    reinterpret_cast<TensorMap*>(from_shared(static_cast<uint32_t>(v.at(0))))->base =
        reinterpret_cast<uint8_t*>(v.at(1));
  } else if (has(text, "tensormap.cp_fenceproxy")) {
    if (threadIdx.x % 32 == 0) {
      std::memcpy(reinterpret_cast<void*>(v.at(0)), from_shared(static_cast<uint32_t>(v.at(1))),
                  128);
    }
    __syncwarp();
  } else if (has(text, "barrier.cluster.arrive")) {
    size_t threads = 0;
    for (const auto& c : *cta->cluster) threads += c->fibers.size();
    meet(*cta->cluster_meeting, threads);
  } else if (has(text, "%%cluster_ctarank")) {
    *static_cast<uint32_t*>(operands[0].out) = cta->rank;
  } else if (has(text, "mapa")) {
    const uint32_t peer = static_cast<uint32_t>(v.at(2) + 1) * kPeerBase;
    *static_cast<uint32_t*>(operands[0].out) = static_cast<uint32_t>(v.at(1)) + peer;
  } else if (has(text, "st.shared::cluster")) {
    const uint32_t value = static_cast<uint32_t>(v.at(1));
    std::memcpy(from_shared(static_cast<uint32_t>(v.at(0))), &value, 4);
  } else if (has(text, "bar.sync")) {
    meet(cta->named[1], static_cast<uint32_t>(v.at(0)));
  } else if (!has(text, "fence") && !has(text, "setmaxnreg") && !float_op(text, operands)) {
    std::fprintf(stderr, "simt: unknown PTX: %s\n", text.c_str());
    std::abort();
  }
}

}  // namespace simt
