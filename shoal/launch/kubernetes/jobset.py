"""The JobSet of a run: one Indexed Job of N pods, each of which starts its ranks by `pod`.

Ranks meet at the first pod's name, which the JobSet's headless service knows. A run that was
stopped and has saved ends with 75, and so does its pod; the JobSet starts all pods again, as it
does after a pod was evicted or preempted. After other failures it does so `restarts` times.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import yaml

from shoal.launch.cluster_work import ClusterWork
from shoal.launch.rank import EXIT_RESTART

API_VERSION = "jobset.x-k8s.io/v1alpha2"
JOB = "ranks"
"""The name of the JobSet's only job, and of the container in its pods."""
PORT = 29_400
"""The port of the rendezvous. A pod has all ports to itself."""
POD = "shoal.launch.kubernetes.pod"
GRACE_S = 120
"""Seconds from SIGTERM to SIGKILL, in which ranks finish their step and save."""
NAME = re.compile(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?")
QUANTITY = re.compile(r"(?P<name>[\w.-]+(/[\w.-]+)?)=(?P<value>\d+(\.\d+)?(m|[kMGTP]i?)?)")
CLAIM = re.compile(r"(?P<name>[a-z0-9]([a-z0-9.-]*[a-z0-9])?):(?P<path>/[^:]*)")

Json = dict[str, Any]


@dataclass(frozen=True)
class JobSetOptions:
    """The size of a JobSet, and the world that its containers find.

    Args:
        name: of the JobSet, and a part of the pods' names.
        pods: >= 1.
        ranks_per_pod: >= 1.
        cpus_per_rank: processors; None leaves a pod without a limit.
        image: the container's image.
        namespace: None for the one that kubectl uses.
        directory: where ranks run; None for the image's working directory.
        limits: `NAME=QUANTITY` of each pod.
        claims: `NAME:DIR`, persistent volume claims that all pods mount.
        requeues: 0 if a run that was stopped must not go on by itself.
        python: the interpreter in the image.
    """

    name: str
    pods: int
    ranks_per_pod: int
    cpus_per_rank: int | None
    image: str
    namespace: str | None
    directory: str | None
    limits: tuple[str, ...]
    claims: tuple[str, ...]
    requeues: int
    python: str

    def problems(self) -> Iterator[str]:
        """Yield a line for each value that Kubernetes would not take."""
        names = {"job-name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        for option, name in names.items():
            if NAME.fullmatch(name) is None:
                yield (
                    f"--{option} '{name}': at most 40 lower-case letters, digits and -, a letter "
                    "first"
                )
        if not self.image or not self.image.isprintable() or " " in self.image:
            yield (
                f"--image '{self.image}': the name of an image with Shoal and the script is needed"
            )
        if self.directory is not None and not self.directory.startswith("/"):
            yield f"--workdir {self.directory}: begin with /"
        for limit in self.limits:
            if QUANTITY.fullmatch(limit) is None:
                yield f"--limit {limit}: NAME=QUANTITY, for example nvidia.com/gpu=4 or memory=32Gi"
        for claim in self.claims:
            if CLAIM.fullmatch(claim) is None:
                yield f"--claim {claim}: NAME:DIR, for example runs:/data/runs"


def default_name(name: str) -> str:
    """Return a JobSet's name for an experiment or a script."""
    label = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}"
    return label[:40].strip("-")


def render(options: JobSetOptions, work: ClusterWork) -> str:
    """Return the JobSet as YAML, for options without problems."""
    text: str = yaml.safe_dump(manifest(options, work), sort_keys=False, width=100)
    return text


def manifest(options: JobSetOptions, work: ClusterWork) -> Json:
    """Return the JobSet for options without problems."""
    metadata: Json = {"name": options.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    job: Json = {
        "completionMode": "Indexed",
        "completions": options.pods,
        "parallelism": options.pods,
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": _pod_failure_rules()},
        "template": {"spec": _pod_spec(options, work)},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": work.restarts,
                "rules": [_stopped_rule(options.requeues > 0)],
            },
            "replicatedJobs": [{"name": JOB, "replicas": 1, "template": {"spec": job}}],
        },
    }


def _pod_failure_rules() -> list[Json]:
    saved = {"containerName": JOB, "operator": "In", "values": [EXIT_RESTART]}
    return [
        {"action": "FailJob", "onExitCodes": saved},
        {
            "action": "FailJob",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
    ]


def _stopped_rule(goes_on: bool) -> Json:
    """Return the rule for a job that failed by one of `_pod_failure_rules`."""
    return {
        "name": "stopped",
        "action": "RestartJobSetAndIgnoreMaxRestarts" if goes_on else "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [JOB],
    }


def _pod_spec(options: JobSetOptions, work: ClusterWork) -> Json:
    claims = [found for claim in options.claims if (found := CLAIM.fullmatch(claim))]
    container: Json = {
        "name": JOB,
        "image": options.image,
        "command": [options.python, "-m", POD, *_pod_words(options, work), "--", *work.words],
        "env": [{"name": name, "value": value} for name, value in _environment(options, work)],
        "volumeMounts": [
            {"name": "shm", "mountPath": "/dev/shm"},
            *({"name": f"claim-{n}", "mountPath": c["path"]} for n, c in enumerate(claims)),
        ],
    }
    if options.directory is not None:
        container["workingDir"] = options.directory
    if limits := _limits(options):
        container["resources"] = {"limits": limits}
    return {
        "restartPolicy": "Never",
        # No rank asks the cluster for anything, so none gets a token for it.
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "containers": [container],
        "volumes": [
            # Ranks of one pod share gradients there, and a container has 64 MiB by default.
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": f"claim-{n}", "persistentVolumeClaim": {"claimName": c["name"]}}
                for n, c in enumerate(claims)
            ),
        ],
    }


def _pod_words(options: JobSetOptions, work: ClusterWork) -> list[str]:
    words = ["--pods", str(options.pods), "--ranks", str(options.ranks_per_pod)]
    return words if work.output != "first" else [*words, "--first"]


def _environment(options: JobSetOptions, work: ClusterWork) -> Iterator[tuple[str, str]]:
    yield "PYTHONUNBUFFERED", "1"
    yield "MASTER_ADDR", f"{options.name}-{JOB}-0-0.{options.name}"
    yield "MASTER_PORT", str(PORT)
    if options.cpus_per_rank is not None:
        yield "OMP_NUM_THREADS", str(options.cpus_per_rank)
    yield from work.environment.items()


def _limits(options: JobSetOptions) -> dict[str, str]:
    limits = {}
    if options.cpus_per_rank is not None:
        limits["cpu"] = str(options.cpus_per_rank * options.ranks_per_pod)
    found = (QUANTITY.fullmatch(limit) for limit in options.limits)
    return limits | {match["name"]: match["value"] for match in found if match}
