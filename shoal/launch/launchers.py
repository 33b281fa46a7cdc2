"""The variables by which each launcher tells a process its rank.

Each function reads one launcher. It returns None where that launcher did not start this process.
`environment.read` defines the order in which they are asked.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import replace

from shoal.launch.private_memory import STORE
from shoal.launch.variables import Launcher, RankInfo, Variables, counts, first_host

# Derived rendezvous ports. The range lies below the ephemeral ports of Linux (from 32768) and the
# node ports of Kubernetes (from 30000), so that no system hands out one of them by itself.
FIRST_PORT = 15_000
PORTS = 15_000
# Slurm gives step ids from here on to batch scripts, interactive shells and the like.
FIRST_SPECIAL_STEP = 0xFFFF_FF00
# The interactive step of an salloc has the SLURM_NTASKS of its job: ask for the step's first.
STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
LOOPBACK = "127.0.0.1"
TF_TASKS = ("chief", "master", "worker")  # those that train, in the order of their ranks


def from_shoal_env(variables: Variables) -> RankInfo:
    """Read the variables of Shoal's own launcher. Its ranks meet in a store of its own."""
    info = _standard_variables(variables, "shoal", "started by shoal", variables.has(STORE))
    return replace(info, store=variables.text(STORE))


def torchrun(variables: Variables) -> RankInfo | None:
    """Read the variables of torchrun, which is torch.distributed.run."""
    if not variables.has("TORCHELASTIC_RUN_ID"):
        return None
    run_id = variables.text("TORCHELASTIC_RUN_ID")
    return _standard_variables(variables, "torchrun", f"started by torchrun, run {run_id}")


def _standard_variables(
    variables: Variables, launcher: Launcher, reason: str, has_store: bool = False
) -> RankInfo:
    """Read the variables that torchrun sets. With a store of its own a launcher needs no master."""
    needs_master = not has_store or variables.has("MASTER_ADDR", "MASTER_PORT")
    return RankInfo(
        rank=variables.required_number("RANK"),
        world=variables.required_number("WORLD_SIZE"),
        local_rank=variables.required_number("LOCAL_RANK"),
        local_world=variables.required_number("LOCAL_WORLD_SIZE"),
        launcher=launcher,
        master_address=variables.required("MASTER_ADDR", str) if needs_master else None,
        master_port=variables.required_number("MASTER_PORT") if needs_master else None,
        reason=reason,
    )


def mpi(variables: Variables) -> RankInfo | None:
    """Read the variables of Open MPI's mpirun, or of Hydra's mpiexec (MPICH, Intel MPI)."""
    job = None
    if variables.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        job = variables.text("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
        implementation = "Open MPI"
    elif variables.has("PMI_RANK", "PMI_SIZE") and (
        # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE as well, but in a step and without the others.
        variables.has("MPI_LOCALRANKID", "MPI_LOCALNRANKS") or not _is_in_step(variables)
    ):
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        implementation = "MPICH or Intel MPI"
    else:
        return None
    rank, world, local_rank, local_world = (variables.required_number(name) for name in names)
    reason = f"started by mpirun ({implementation})"
    host = None
    if local_world == world:
        host = LOOPBACK
        # Hydra has no id of the job. All ranks on one machine are children of one daemon, though.
        job = job or f"child of {variables.parent_pid}"
    elif not variables.has("MASTER_ADDR"):
        variables.problems.append(
            f"MASTER_ADDR is missing, and only {local_world} of {world} ranks are on this machine. "
            "Name the machine of rank 0: mpirun -x MASTER_ADDR=HOST (MPICH and Intel MPI: -genv "
            "MASTER_ADDR HOST)."
        )
    address, port = _rendezvous_address(variables, host, job)
    return RankInfo(rank, world, local_rank, local_world, "mpi", address, port, reason)


def slurm(variables: Variables) -> RankInfo | None:
    """Read the variables of a Slurm step, which srun has started."""
    if not _is_in_step(variables):
        return None
    world = variables.required_number(*STEP_TASKS)
    step_id = variables.text("SLURM_STEP_ID")
    name = f"step {step_id} of Slurm job {variables.text('SLURM_JOB_ID', 'SLURM_JOBID')}"
    if world == 1:
        return RankInfo(0, 1, 0, 1, "slurm", None, None, name)
    rank = variables.required_number("SLURM_PROCID")
    local_rank = variables.required_number("SLURM_LOCALID")
    local_world = _local_tasks(variables, world)
    if not variables.problems:  # after a problem the numbers may be placeholders
        _check_step(variables, world, local_world)
    host = LOOPBACK if local_world == world else _host_of_rank_0(variables)
    address, port = _rendezvous_address(variables, host, name)
    return RankInfo(rank, world, local_rank, local_world, "slurm", address, port, name)


def _local_tasks(variables: Variables, world: int) -> int:
    """Return the number of the step's tasks on this machine; `world` after a problem."""
    tasks = variables.required("SLURM_STEP_TASKS_PER_NODE", counts)
    if not tasks:
        return world
    node = variables.required_number("SLURM_NODEID") if len(tasks) > 1 else 0
    if sum(tasks) == world and node < len(tasks):
        return tasks[node]
    given = f"SLURM_STEP_TASKS_PER_NODE={variables.text('SLURM_STEP_TASKS_PER_NODE')}"
    variables.problems.append(
        f"{given} does not fit a step of {world} tasks and SLURM_NODEID={node}."
    )
    return world


def _check_step(variables: Variables, world: int, local_world: int) -> None:
    """Add a problem where the SLURM_STEP_ variables describe another step.

    An sbatch that is called inside a step passes that step's SLURM_STEP_ variables on to its
    script, where they are wrong. Slurm sets SLURM_NTASKS and SLURM_GTIDS (the ranks on this
    machine) anew for every script and every step, so these two reveal it.
    """
    tasks = variables.number("SLURM_NTASKS")
    local_ranks = variables.text("SLURM_GTIDS")
    same_world = tasks in (None, world)
    if same_world and (local_ranks is None or len(local_ranks.split(",")) == local_world):
        return
    variables.problems.append(
        f"The SLURM_STEP_ variables tell of {world} tasks, {local_world} of them here, but "
        f"SLURM_NTASKS={tasks} and SLURM_GTIDS={local_ranks} of others: they were left over from "
        "the step in which this job was submitted. "
        "Put `unset SLURM_STEP_ID SLURM_STEPID` at the top of the job's script."
    )


def _host_of_rank_0(variables: Variables) -> str | None:
    """Return the first host of the step.

    Slurm sorts lists of hosts. Where the tasks have another order, the list does not say which
    host has rank 0, so MASTER_ADDR is needed.
    """
    is_unsorted = variables.text("SLURM_DISTRIBUTION") == "arbitrary"
    is_unsorted = is_unsorted or variables.has("SLURM_HET_SIZE")
    if is_unsorted and not variables.has("MASTER_ADDR"):
        variables.problems.append(
            "MASTER_ADDR is missing, and rank 0 may be on any machine of a heterogeneous job or of "
            "--distribution=arbitrary. Name its machine: MASTER_ADDR=HOST srun ..."
        )
    return variables.required("SLURM_STEP_NODELIST", first_host)


def step_tasks(variables: Variables) -> int | None:
    """Return the number of tasks of this process's Slurm step; None outside of a step.

    The step in which mpirun starts a daemon on every node does not count: its tasks are not the
    user's programs.
    """
    is_step_of_daemons = mpirun_is_here(variables) is False
    if is_step_of_daemons or not _is_in_step(variables):
        return None
    return variables.number(*STEP_TASKS)


def mpi_tasks(variables: Variables) -> int | None:
    """Return the number of ranks that mpirun started; None where mpirun is not involved."""
    return variables.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def mpirun_is_here(variables: Variables) -> bool | None:
    """Return True if mpirun is this process's parent, False if one of its daemons is.

    None: the variables do not say it (all but Open MPI 4).
    """
    parent_uri = variables.text("OMPI_MCA_orte_local_daemon_uri")
    mpirun_uri = variables.text("OMPI_MCA_orte_hnp_uri")
    return None if parent_uri is None else parent_uri == mpirun_uri


def _is_in_step(variables: Variables) -> bool:
    step = variables.text("SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def environment(variables: Variables) -> RankInfo | None:
    """Read RANK and WORLD_SIZE that a person or a cluster's operator has set."""
    if not variables.has("RANK", "WORLD_SIZE"):
        return None
    rank = variables.required_number("RANK")
    world = variables.required_number("WORLD_SIZE")
    local_rank, local_world = 0, 1
    reason = "RANK and WORLD_SIZE are set"
    if variables.has("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        local_rank = variables.required_number("LOCAL_RANK")
        local_world = variables.required_number("LOCAL_WORLD_SIZE")
    else:
        reason += "; one rank on each machine, as LOCAL_RANK is not"
    address = variables.text("MASTER_ADDR")
    port = variables.number("MASTER_PORT")
    if world > 1:
        address = variables.required("MASTER_ADDR", str)
        port = variables.required_number("MASTER_PORT")
    return RankInfo(rank, world, local_rank, local_world, "environment", address, port, reason)


def tf_config(variables: Variables) -> RankInfo | None:
    """Read TF_CONFIG, which clusters for TensorFlow set: one rank in each task, the chief first."""
    text = variables.text("TF_CONFIG")
    if text is None:
        return None
    try:
        document = json.loads(text)
        cluster, task = document["cluster"], document["task"]
        tasks = [(kind, i) for kind in TF_TASKS for i in range(len(cluster.get(kind, ())))]
        kinds = [kind for kind in TF_TASKS if cluster.get(kind)]
        host, _, port = str(cluster[kinds[0]][0]).rpartition(":")
        rank = tasks.index((task["type"], int(task["index"])))
        info = RankInfo(rank, len(tasks), 0, 1, "tf_config", host, int(port), "TF_CONFIG is set")
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        variables.problems.append(
            "TF_CONFIG does not tell the rank of this process: it must be JSON with a cluster of "
            "chief and worker, each a list of HOST:PORT, and a task with one of these types and "
            f"an index ({type(error).__name__}: {error})."
        )
        return RankInfo(0, 1, 0, 1, "tf_config", None, None, "TF_CONFIG is set")
    return info


def single_process(variables: Variables) -> RankInfo:
    """Return a world of one process, with the reason for it."""
    reason = "no launcher's variables are set"
    if mpi_tasks(variables) is not None:
        reason = "mpirun started one task"
    elif step_tasks(variables) == 1:
        reason = "the Slurm step has one task"
    elif variables.has("SLURM_JOB_ID"):
        reason = "a Slurm job's own shell, not a step: srun starts one rank for each task"
    return RankInfo(0, 1, 0, 1, "single", None, None, reason)


def _rendezvous_address(
    variables: Variables, host: str | None, job: str | None
) -> tuple[str | None, int | None]:
    """Return MASTER_ADDR and MASTER_PORT, or defaults that are the same on all ranks of a job.

    Args:
        host: the address where MASTER_ADDR is not set.
        job: an id of the job; the default port is a hash of it. None: MASTER_PORT is needed.
    """
    address = variables.text("MASTER_ADDR") or host
    if job is None or variables.has("MASTER_PORT"):
        return address, variables.required_number("MASTER_PORT")
    return address, FIRST_PORT + zlib.crc32(job.encode()) % PORTS
