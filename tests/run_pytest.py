"""Entry point of the tests under Bazel: hands its arguments to pytest."""

import pathlib
import sys

import pytest

import jax_iser

if __name__ == "__main__":
    built = pathlib.Path(__file__).absolute().parent.parent / "jax_iser"
    found = pathlib.Path(jax_iser.__file__).parent
    assert found == built, f"jax_iser comes from {found}, not from what Bazel built in {built}"
    sys.exit(pytest.main(sys.argv[1:]))
