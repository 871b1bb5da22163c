// Eigen's product on the calling thread, for bench_gemm.py.
#include <Eigen/Core>

#define ISER_STRING(x) #x
#define ISER_VERSION(a, b, c) ISER_STRING(a) "." ISER_STRING(b) "." ISER_STRING(c)

extern "C" const char* version() {
  return ISER_VERSION(EIGEN_WORLD_VERSION, EIGEN_MAJOR_VERSION, EIGEN_MINOR_VERSION);
}

extern "C" void gemm(int m, int n, int k, const float* x, const float* w, float* c) {
  using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  Eigen::Map<Matrix>(c, m, n).noalias() =
      Eigen::Map<const Matrix>(x, m, k) * Eigen::Map<const Matrix>(w, n, k).transpose();
}
