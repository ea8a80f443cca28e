"""One topology's compilations, in a process of their own: a compiler that gives up may end the process.

`python -m dmpo_jax.planning NAME full|quick` reads a resolved configuration as TOML from standard input and prints the
findings as one line of JSON, or `{"refused": reason}` for what the configuration itself forbids.
"""

import json
import sys
import tomllib

from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.planning.chips import parse_topology
from dmpo_jax.planning.compiled import examine

try:
    found = examine(resolve(tomllib.loads(sys.stdin.read())), parse_topology(sys.argv[1]), sys.argv[2] == "quick")
except UserError as error:
    found = {"refused": str(error)}
print(json.dumps(found))
