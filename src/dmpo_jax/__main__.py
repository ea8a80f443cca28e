"""`python -m dmpo_jax` is the `dmpo` command."""

import sys

from dmpo_jax.cli import main

sys.exit(main())
