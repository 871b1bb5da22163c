// Planted fault: two threads add to one plain integer. ThreadSanitizer has to report it.
#include <thread>

int main() {
  long sum = 0;
  const auto add = [&sum] {
    for (int i = 0; i < 1000; ++i) ++sum;
  };
  std::thread other(add);
  add();
  other.join();
  return sum == 1;
}
