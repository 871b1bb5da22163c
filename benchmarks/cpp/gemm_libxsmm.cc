// libxsmm's generated kernels on the calling thread, for bench_gemm.py. They take no transposed
// first operand, so blocks of 64 weight rows are transposed to a buffer first.
#include <libxsmm.h>

#include <algorithm>
#include <cstdlib>
#include <vector>

extern "C" const char* version() { return LIBXSMM_VERSION; }

extern "C" void gemm(int m, int n, int k, const float* x, const float* w, float* c) {
  constexpr int kBlock = 64;
  static thread_local std::vector<float> transposed;
  transposed.resize(static_cast<size_t>(kBlock) * k);
  const float one = 1, zero = 0;
  for (int n0 = 0; n0 < n; n0 += kBlock) {
    const int rows = std::min(kBlock, n - n0);
    libxsmm_otrans(transposed.data(), w + static_cast<size_t>(n0) * k, sizeof(float), k, rows, k,
                   rows);
    // In column-major terms: C^T[n, m] = W^T's block [n, k] times X^T [k, m].
    const libxsmm_smmfunction kernel =
        libxsmm_smmdispatch(rows, m, k, &rows, &k, &n, &one, &zero, nullptr, nullptr);
    if (!kernel) std::abort();
    kernel(transposed.data(), x, c + n0);
  }
}
