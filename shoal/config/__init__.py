"""Settings: the dataclasses of a job, how files and flags become one, and how a job is written.

Nothing here imports torch, because login nodes of clusters have none.
"""

from shoal.config.distribuuuu import translate
from shoal.config.explain import differences, explain, to_yaml
from shoal.config.fields import leaf_settings
from shoal.config.job import Job
from shoal.config.layers import builtin_names
from shoal.config.read import Settings, read

__all__ = [
    "Job",
    "Settings",
    "builtin_names",
    "differences",
    "explain",
    "leaf_settings",
    "read",
    "to_yaml",
    "translate",
]
