"""Settings: what a job is, how it is read from files and flags, and how it is written down. Imports no torch."""

from shoal.config.differences import differences
from shoal.config.distribuuuu import translate
from shoal.config.explain import explain, to_yaml
from shoal.config.files import builtin_names
from shoal.config.job import Job
from shoal.config.read import Settings, read

__all__ = ["Job", "Settings", "builtin_names", "differences", "explain", "read", "to_yaml", "translate"]
