"""A JobSet in the cluster's hands, by kubectl."""

from __future__ import annotations

import shutil
import subprocess
import sys

from shoal.errors import UsageError


def missing_commands() -> list[str]:
    """Return a line if there is no kubectl."""
    if shutil.which("kubectl"):
        return []
    return [
        "--kubernetes: there is no kubectl on the PATH. Install it, or use --dry-run "
        "and give the JobSet to the cluster in another way"
    ]


def apply(text: str, name: str, namespace: str | None) -> int:
    """Create the JobSet, and say how to see its log and how to end it. It runs by itself.

    Args:
        text: the JobSet.
        name: its name.
        namespace: None for the one that kubectl uses.

    Raises:
        UsageError: kubectl refuses the JobSet, or there is one of that name.
    """
    # `apply` would say "unchanged" of a JobSet that has ended, and start nothing.
    ended = subprocess.run(
        ["kubectl", "create", "-f", "-"], input=text, capture_output=True, text=True
    )
    where = "" if namespace is None else f" -n {namespace}"
    if ended.returncode != 0:
        message = f"kubectl refused the JobSet: {' '.join(ended.stderr.split())}"
        if "AlreadyExists" in ended.stderr:
            message += f". Remove it first: kubectl delete jobset {name}{where}"
        elif "no matches for kind" in ended.stderr:
            message += ". The cluster needs the JobSet controller: https://jobset.sigs.k8s.io"
        raise UsageError(message)
    first = f"jobset.sigs.k8s.io/jobset-name={name},batch.kubernetes.io/job-completion-index=0"
    print(
        f"shoal: JobSet {name} is created; it runs by itself\n"
        f"  its log: kubectl logs{where} -f -l {first}\n"
        f"  to end it: kubectl delete jobset {name}{where}",
        file=sys.stderr,
    )
    return 0
