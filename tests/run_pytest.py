"""Entry point of the tests under Bazel: hands its arguments to pytest."""

import sys

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(sys.argv[1:]))
