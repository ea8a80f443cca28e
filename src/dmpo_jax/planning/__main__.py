"""One topology's compilations, in a process of their own: a compiler that gives up may end the process.

`python -m dmpo_jax.planning NAME full|quick all|cycle` reads a resolved configuration as TOML from standard input and
prints the findings as one line of JSON, or `{"refused": reason}` for what the configuration itself forbids.
"""

import json
import sys
import tomllib

from dmpo_jax.config import resolve
from dmpo_jax.errors import UserError
from dmpo_jax.planning.chips import parse_topology
from dmpo_jax.planning.compiled import examine

name, effort, programs = sys.argv[1:]
try:
    config = resolve(tomllib.loads(sys.stdin.read()))
    found = examine(config, parse_topology(name), effort == "quick", programs == "cycle")
except UserError as error:
    found = {"refused": str(error)}
print(json.dumps(found))
