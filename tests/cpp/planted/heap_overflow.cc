// Planted fault: reads one element past a heap block. AddressSanitizer has to stop it.
#include <vector>

int main(int argc, char**) {
  std::vector<int> values(4, 1);
  return values.data()[3 + argc] == 1234;
}
