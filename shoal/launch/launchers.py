"""How each launcher tells a process its place; environment.py says in which order they are
asked.
"""

from __future__ import annotations

import zlib

from shoal.launch.hostlist import counts, first_host
from shoal.launch.rank_info import Launcher, RankInfo
from shoal.launch.variables import Variables

FIRST_PORT, PORTS = (
    15_000,
    15_000,
)  # below what Linux hands out by itself (32768 and up) and Kubernetes maps (30000)
FIRST_SPECIAL_STEP = (
    0xFFFF_FF00  # from here on Slurm numbers batch scripts, interactive shells and the like
)
STEP_TASKS = (
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)  # an salloc's interactive step has its job's SLURM_NTASKS
LOOPBACK = "127.0.0.1"


def from_shoal_env(variables: Variables) -> RankInfo:
    """Shoal's own launcher."""
    return _standard_variables(variables, "shoal", "started by shoal")


def torchrun(variables: Variables) -> RankInfo | None:
    """torchrun, which is torch.distributed.run."""
    if not variables.has("TORCHELASTIC_RUN_ID"):
        return None
    return _standard_variables(
        variables, "torchrun", f"started by torchrun, run {variables.text('TORCHELASTIC_RUN_ID')}"
    )


def _standard_variables(variables: Variables, launcher: Launcher, reason: str) -> RankInfo:
    return RankInfo(
        variables.needed_number("RANK"),
        variables.needed_number("WORLD_SIZE"),
        variables.needed_number("LOCAL_RANK"),
        variables.needed_number("LOCAL_WORLD_SIZE"),
        launcher,
        variables.needed("MASTER_ADDR", str),
        variables.needed_number("MASTER_PORT"),
        reason,
    )


def mpi(variables: Variables) -> RankInfo | None:
    """mpirun of Open MPI, or mpiexec with the Hydra of MPICH and Intel MPI."""
    if variables.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        job = variables.text("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
        name = "Open MPI"
    elif variables.has("PMI_RANK", "PMI_SIZE") and (
        variables.has("MPI_LOCALRANKID", "MPI_LOCALNRANKS") or not _is_in_step(variables)
    ):  # srun --mpi=pmi2 sets the first two as well
        names = ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
        job, name = None, "MPICH or Intel MPI"
    else:
        return None
    rank, world, local_rank, local_world = (variables.needed_number(name) for name in names)
    reason = f"started by mpirun ({name})"
    if local_world == world:
        job = job or f"child of {variables.parent_pid}"
        return RankInfo(
            rank,
            world,
            local_rank,
            local_world,
            "mpi",
            *_rendezvous_address(variables, LOOPBACK, job),
            reason,
        )
    if not variables.has("MASTER_ADDR"):
        variables.problems.append(
            f"MASTER_ADDR is missing, and only {local_world} of {world} ranks are on this machine. "
            "Name the machine of rank 0: mpirun -x MASTER_ADDR=HOST (MPICH and Intel MPI: -genv "
            "MASTER_ADDR HOST)."
        )
    return RankInfo(
        rank,
        world,
        local_rank,
        local_world,
        "mpi",
        *_rendezvous_address(variables, None, job),
        reason,
    )


def slurm(variables: Variables) -> RankInfo | None:
    """A step that srun has started."""
    if not _is_in_step(variables):
        return None
    world = variables.needed_number(*STEP_TASKS)
    name = f"step {variables.text('SLURM_STEP_ID')} of Slurm job {variables.text('SLURM_JOB_ID', 'SLURM_JOBID')}"
    if world == 1:
        return RankInfo(0, 1, 0, 1, "slurm", None, None, name)
    rank, local_rank = (
        variables.needed_number("SLURM_PROCID"),
        variables.needed_number("SLURM_LOCALID"),
    )
    local_world = _tasks_here(variables, world)
    if not variables.problems:  # else the numbers may be stand-ins
        _check_step(variables, world, local_world)
    host = LOOPBACK if local_world == world else _host_of_rank_0(variables)
    return RankInfo(
        rank,
        world,
        local_rank,
        local_world,
        "slurm",
        *_rendezvous_address(variables, host, name),
        name,
    )


def _tasks_here(variables: Variables, world: int) -> int:
    tasks = variables.needed("SLURM_STEP_TASKS_PER_NODE", counts)
    if not tasks:
        return world
    node = variables.needed_number("SLURM_NODEID") if len(tasks) > 1 else 0
    if sum(tasks) == world and node < len(tasks):
        return tasks[node]
    given = f"SLURM_STEP_TASKS_PER_NODE={variables.text('SLURM_STEP_TASKS_PER_NODE')}"
    variables.problems.append(
        f"{given} does not fit a step of {world} tasks and SLURM_NODEID={node}."
    )
    return world


def _check_step(variables: Variables, world: int, local_world: int) -> None:
    """SLURM_STEP_ variables reach the script of an sbatch from the step in which that was called,
    and are wrong there.

    SLURM_NTASKS and SLURM_GTIDS, the ranks on this machine, are set anew for every script and every
    step."""
    tasks, ranks_here = variables.number("SLURM_NTASKS"), variables.text("SLURM_GTIDS")
    if tasks in (None, world) and (ranks_here is None or len(ranks_here.split(",")) == local_world):
        return
    variables.problems.append(
        f"The SLURM_STEP_ variables tell of {world} tasks, {local_world} of them here, but "
        f"SLURM_NTASKS={tasks} and "
        f"SLURM_GTIDS={ranks_here} of others: they were left over from the step in which this job "
        "was submitted. "
        "Put `unset SLURM_STEP_ID SLURM_STEPID` at the top of the job's script."
    )


def _host_of_rank_0(variables: Variables) -> str | None:
    """The step's first host. Lists of hosts are sorted, though, so that other orders of tasks
    cannot be told.
    """
    has_own_order = variables.text("SLURM_DISTRIBUTION") == "arbitrary" or variables.has(
        "SLURM_HET_SIZE"
    )
    if has_own_order and not variables.has("MASTER_ADDR"):
        variables.problems.append(
            "MASTER_ADDR is missing, and rank 0 may be on any machine of a heterogeneous job or of "
            "--distribution=arbitrary. Name its machine: MASTER_ADDR=HOST srun ..."
        )
    return variables.needed("SLURM_STEP_NODELIST", first_host)


def step_tasks(variables: Variables) -> int | None:
    """How many tasks the Slurm step has that this process belongs to; None where it belongs to
    none.

    The step that mpirun starts to have a daemon on every node does not count: its tasks are no
    programs of the user."""
    is_of_daemons = mpirun_is_here(variables) is False
    return variables.number(*STEP_TASKS) if _is_in_step(variables) and not is_of_daemons else None


def mpi_tasks(variables: Variables) -> int | None:
    """How many ranks mpirun has started; None where it started this process in no way."""
    return variables.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def mpirun_is_here(variables: Variables) -> bool | None:
    """Whether this process is a child of mpirun itself or of one of its daemons; None where
    that cannot be told.
    """
    parent, head = (
        variables.text("OMPI_MCA_orte_local_daemon_uri"),
        variables.text("OMPI_MCA_orte_hnp_uri"),
    )
    return None if parent is None else parent == head


def _is_in_step(variables: Variables) -> bool:
    step = variables.text("SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def environment(variables: Variables) -> RankInfo | None:
    """RANK and WORLD_SIZE that someone has set by hand, or a cluster's operator."""
    if not variables.has("RANK", "WORLD_SIZE"):
        return None
    rank, world = variables.needed_number("RANK"), variables.needed_number("WORLD_SIZE")
    has_local = variables.has("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local_rank = variables.needed_number("LOCAL_RANK") if has_local else 0
    local_world = variables.needed_number("LOCAL_WORLD_SIZE") if has_local else 1
    address, port = variables.text("MASTER_ADDR"), variables.number("MASTER_PORT")
    if world > 1:
        address, port = variables.needed("MASTER_ADDR", str), variables.needed_number("MASTER_PORT")
    reason = "RANK and WORLD_SIZE are set" + (
        "" if has_local else "; one rank on each machine, as LOCAL_RANK is not"
    )
    return RankInfo(rank, world, local_rank, local_world, "environment", address, port, reason)


def single_process(variables: Variables) -> RankInfo:
    """One process, and why."""
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
    """MASTER_ADDR and MASTER_PORT, or the host and a port that all ranks of one job derive
    alike.
    """
    address = variables.text("MASTER_ADDR") or host
    if job is None or variables.has("MASTER_PORT"):
        return address, variables.needed_number("MASTER_PORT")
    return address, FIRST_PORT + zlib.crc32(job.encode()) % PORTS
