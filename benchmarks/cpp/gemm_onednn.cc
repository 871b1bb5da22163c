// oneDNN's sgemm on the calling thread, for bench_gemm.py.
#include <dnnl.h>
#include <omp.h>

#include <string>

extern "C" const char* version() {
  const dnnl_version_t* v = dnnl_version();
  static const std::string text =
      std::to_string(v->major) + "." + std::to_string(v->minor) + "." + std::to_string(v->patch);
  return text.c_str();
}

extern "C" void gemm(int m, int n, int k, const float* x, const float* w, float* c) {
  omp_set_num_threads(1);  // of this thread alone
  dnnl_sgemm('N', 'T', m, n, k, 1.0f, x, k, w, k, 0.0f, c, n);
}
