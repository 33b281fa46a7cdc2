"""The modules that a fork server imports before it forks ranks.

The server imports them once; otherwise every rank would import them.
"""

from __future__ import annotations

import os
import re
import tokenize

from shoal.errors import LaunchError
from shoal.platform.torch_private import DYNAMO

ALWAYS = (
    "shoal.launch.forkserver_init",  # must be the first
    "numpy",
    "torch",
    "torch.distributed",
    "torch.nn.parallel",
    "torch.utils.data",
    "shoal.launch.rank",
)
# The first optimizer and DistributedDataParallel import it, which takes as long as torch itself.
TRAINING = (DYNAMO,)
# Words in a script that probably needs the modules of TRAINING.
TRAINING_WORDS = ("optim", "DistributedDataParallel", "fully_shard", "compile", "shoal")
# Other modules might start threads or touch a device in their import.
IMPORTED = re.compile(r"^\s*(?:import|from)\s+((?:torch|shoal)\b[\w.]*)", re.MULTILINE)
FOREIGN = "shoal.integrations"  # imports other libraries
RUN = "shoal.run"  # what `shoal.init` imports at its first use


def for_script(path: str) -> list[str]:
    """Return the modules that the script `path` imports and a fork server may import first.

    Raises:
        LaunchError: there is no such file.
    """
    try:
        with tokenize.open(path) as file:
            source = file.read()
    except OSError as error:
        raise LaunchError(
            f"The script '{path}' cannot be read from {os.getcwd()}: {error.strerror}."
        ) from error
    except (SyntaxError, UnicodeDecodeError):  # the ranks report text that is no Python
        return []
    names = IMPORTED.findall(source)
    safe = {name for name in names if "._" not in name and not name.startswith(FOREIGN)}
    if any(name.startswith("shoal") for name in names):
        safe.add(RUN)
    trains = any(word in source for word in TRAINING_WORDS)
    return [*sorted(safe), *(TRAINING if trains else ())]
