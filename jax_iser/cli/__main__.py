"""`python -m jax_iser.cli`, the same as `jax-iser`."""

import sys

from jax_iser.cli import main

sys.exit(main())
