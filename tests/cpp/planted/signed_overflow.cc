// Planted fault: a signed sum overflows. UndefinedBehaviorSanitizer has to stop it.
#include <limits>

int main(int argc, char**) {
  const int sum = std::numeric_limits<int>::max() + argc;
  return sum == 1234;
}
