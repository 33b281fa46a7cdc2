"""`shoal.init("auto")`: the strategy that `shoal plan` recommends for the script that calls it.

      rank 0    shoal plan train.py -n 4 --json ── best ──┐
      others    wait                                       └─> every rank has the same line

The planner follows the script in a process of its own, so this one's model need not exist yet.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from shoal.comm.mesh import Mesh
from shoal.errors import ConfigError, StrategyRefused

AUTO = "auto"


def choose_strategy(mesh: Mesh) -> tuple[str, str]:
    """Return the strategy line for this script, and a sentence with the reason. Collective.

    Raises:
        ConfigError: ranks on several hosts, or a program that is no file; or what `shoal plan`
            says of a script that it cannot follow.
        StrategyRefused: no strategy fits.
    """
    problem, answer = _why_not(mesh), ""
    if not problem and mesh.rank == 0:
        words = [sys.argv[0], "-n", str(mesh.size), "--json", "--", *sys.argv[1:]]
        variables = {**os.environ, "SHOAL_LAUNCHER": "single"}
        done = subprocess.run(
            [sys.executable, "-m", "shoal", "plan", *words],
            env=variables,
            capture_output=True,
            text=True,
        )
        answer = done.stdout.strip().rpartition("\n")[2]
        problem = done.stderr.strip() if not answer.startswith("{") else ""
    problem, answer = json.loads(mesh.broadcast_str(json.dumps((problem, answer))))
    found = {} if problem else json.loads(answer)
    if problems := found.get("errors", [problem] if problem else []):
        raise ConfigError([f"strategy auto: {problem}" for problem in problems])
    plans = found["result"]
    if plans["best"] is None:
        raise StrategyRefused(plans["choice"])
    return plans["best"], plans["choice"]


def _why_not(mesh: Mesh) -> str:
    """Return why no script can be followed; "" if one can."""
    if mesh.place.local_world < mesh.size:
        return (
            "it chooses for ranks on one machine. `shoal plan train.py --cluster FILE` plans "
            "several hosts"
        )
    program = sys.modules["__main__"]
    if getattr(program, "__spec__", None) is not None or not Path(sys.argv[0]).is_file():
        return (
            "it follows a script from its file, and this program has none, such as "
            "`python train.py`. Write the strategy that `shoal plan` tells"
        )
    return ""
