"""This process's rank, read from the variables of its launcher.

This is the only module that reads launchers' variables. It never guesses: variables that contradict
each other are an error, which tells all problems at once. `read` asks in this order, the innermost
launcher first, and the first one that is present decides:

1. Shoal's own launcher, whose surroundings (a Slurm job, for example) only started it.
2. torchrun.
3. mpirun. It starts its daemons as a Slurm step: the variables of that step describe the daemons.
4. A Slurm step, that is `srun`. The shell of an `salloc` and the script of an `sbatch` are no step:
   they have no SLURM_STEP_ID, or one of the ids that Slurm reserves for them.
5. RANK and WORLD_SIZE alone, set by a person or by a cluster's operator.
6. None of these: a single process. A Slurm step or an mpirun of one task is one too.

SHOAL_LAUNCHER=single, torchrun, mpi, slurm or environment replaces the order: only that launcher is
asked. docs/launchers.md has the variables of each, where ranks meet, and what is refused.

Slurm has two compressed notations: lists of hosts and lists of counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from shoal.errors import EnvironmentConflict, did_you_mean
from shoal.launch.private_memory import STORE
from shoal.launch.rank_info import LOOPBACK, Launcher, RankInfo, Variables, rendezvous_address

__all__ = ["RankInfo", "own_place", "read"]

STARTED_BY_RANK = "started by rank"
SERVER_HOSTS = "SHOAL_SERVER_HOSTS"
"""Variable with the number of hosts that have parameter servers and no rank."""
RANK_PROCESS = "SHOAL_RANK_PROCESS"
"""Variable that a rank sets to its process id and its place, for the programs that it starts."""
# Slurm gives step ids from here on to batch scripts, interactive shells and the like.
FIRST_SPECIAL_STEP = 0xFFFF_FF00
# The interactive step of an salloc has the SLURM_NTASKS of its job: ask for the step's first.
STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def read(environ: Mapping[str, str]) -> RankInfo:
    """Return this process's place in its world.

    Args:
        environ: usually os.environ.

    Raises:
        EnvironmentConflict: the variables contradict each other. The message has all problems.
    """
    variables = Variables(environ)
    requested = variables.text("SHOAL_LAUNCHER")
    if requested is not None and requested not in READERS:
        raise EnvironmentConflict(
            f"SHOAL_LAUNCHER={requested} is no launcher; {did_you_mean(requested, READERS)}."
        )
    info = READERS[requested](variables) if requested else _innermost(variables)
    if info is None:
        raise EnvironmentConflict(
            f"SHOAL_LAUNCHER={requested} was asked for, but its variables are not set."
        )
    if not variables.problems:  # after a problem the numbers may be placeholders
        _check_numbers(variables, info)
    if variables.problems:
        headline = f"The launcher's variables contradict each other ({info.reason}):"
        # A variable that was read twice has its problem twice.
        raise EnvironmentConflict("\n  ".join(dict.fromkeys([headline, *variables.problems])))
    return info


def own_place(processes: int | None = None) -> RankInfo:
    """Return the place of this process by its variables, and take it.

    A program that a rank starts inherits the rank's variables and not its place, which is taken:
    it is a world of one.

    Args: processes: the value of -n, which the world of another launcher must have.

    Raises: EnvironmentConflict: as `read`; or the world is another one.
    """
    info = read(os.environ)
    if info.world > 1:
        place = f"{info.rank}@{info.master_address}:{info.master_port},{info.store}"
        process, _, taken = os.environ.get(RANK_PROCESS, "").partition(" ")
        if taken == place and process != str(os.getpid()):
            reason = f"{STARTED_BY_RANK} {info.rank} of {info.world}, and no rank of its world"
            return RankInfo(0, 1, 0, 1, "single", None, None, reason)
        os.environ[RANK_PROCESS] = f"{os.getpid()} {place}"
    if processes not in (None, info.world) and info.launcher != "single":
        raise EnvironmentConflict(
            f"{processes} processes were asked for, but this is a world of {info.world} "
            f"({info.reason}). Start {processes} with the same launcher, or ask for {info.world}."
        )
    return info


def is_place_taken() -> bool:
    """Return True if this process, or one above it, has asked for its place: `shoal.init` does."""
    return RANK_PROCESS in os.environ


def _innermost(variables: Variables) -> RankInfo:
    """Return the rank info that the innermost launcher defines."""
    info = from_torchrun(variables) or from_mpi(variables) or from_slurm(variables)
    if info is None:
        info = from_rank_variables(variables)
        if info is None and variables.has("TF_CONFIG"):
            variables.problems.append(
                "TF_CONFIG is set, which is not read. Set RANK, WORLD_SIZE, MASTER_ADDR and "
                "MASTER_PORT for each task, or SHOAL_LAUNCHER=single to train in this process only."
            )
        return info or single_process(variables)
    if info.launcher == "torchrun":
        # Without GROUP_WORLD_SIZE the number of agents is unknown, and the check does nothing.
        agents = variables.number("GROUP_WORLD_SIZE") or info.world
        for outer_tasks in (mpi_tasks(variables), step_tasks(variables)):
            _check_outer_tasks(variables, info, agents, outer_tasks)
        return info
    if info.launcher == "mpi":
        agents = 1 if mpirun_is_here(variables) else info.world
        _check_outer_tasks(variables, info, agents, step_tasks(variables))
    if info.world == 1 and not variables.problems:
        # The one task may be a shell in which somebody has set RANK and WORLD_SIZE.
        return from_rank_variables(variables) or single_process(variables)
    _check_exported_rank(variables, info)
    return info


def _check_outer_tasks(
    variables: Variables, info: RankInfo, agents: int, outer_tasks: int | None
) -> None:
    """Add a problem where each task of an outer launcher runs an inner launcher of its own.

    Such inner launchers do not know each other. They would make as many worlds, each with a rank 0.

    Args:
        agents: processes of the inner launcher in this world; 1 means that it knows no other.
        outer_tasks: tasks of the outer launcher; None where there is none.
    """
    if agents != 1 or outer_tasks is None or outer_tasks == 1:
        return
    inner, cure = "mpirun", "Start mpirun once, outside of srun"
    if info.launcher == "torchrun":
        inner = "torchrun"
        cure = f"Give torchrun --nnodes={outer_tasks} and one --rdzv-endpoint for all"
    variables.problems.append(
        f"Each of {outer_tasks} tasks of an outer launcher has {inner} of its own, which knows of "
        f"no other: that makes {outer_tasks} separate worlds. {cure}, or leave {inner} out and let "
        f"Shoal read the tasks. If separate runs are meant, set SHOAL_LAUNCHER={info.launcher}."
    )


def _check_exported_rank(variables: Variables, info: RankInfo) -> None:
    """Add a problem where RANK or WORLD_SIZE is set as well, to another value."""
    for name, value in (("RANK", info.rank), ("WORLD_SIZE", info.world)):
        if variables.number(name) not in (None, value):
            variables.problems.append(
                f"{name}={variables.text(name)} is set, but it is {value} according to "
                f"{info.launcher} ({info.reason}). "
                f"Unset {name}, or set SHOAL_LAUNCHER=environment if it is right."
            )


def _check_numbers(variables: Variables, info: RankInfo) -> None:
    """Add a problem for each number that is out of its range."""
    if info.rank >= info.world:
        variables.problems.append(
            f"rank {info.rank} is outside a world of {info.world}; ranks count from 0."
        )
    if info.local_rank >= info.local_world or info.local_world > info.world:
        variables.problems.append(
            f"local rank {info.local_rank} of {info.local_world} on this machine does not fit a "
            f"world of {info.world}."
        )
    if info.master_port is not None and not 0 < info.master_port < 1 << 16:
        variables.problems.append(
            f"MASTER_PORT={info.master_port} is no port; use one between 1024 and 65535."
        )


def from_shoal_env(variables: Variables) -> RankInfo:
    """Read the variables of Shoal's own launcher. Its ranks meet in a store of its own."""
    info = _standard_variables(variables, "shoal", "started by shoal", variables.has(STORE))
    hosts = variables.number(SERVER_HOSTS) or 0
    return replace(info, store=variables.text(STORE), server_hosts=hosts)


def from_torchrun(variables: Variables) -> RankInfo | None:
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


def from_mpi(variables: Variables) -> RankInfo | None:
    """Read the variables of Open MPI's mpirun, or of Hydra's mpiexec (MPICH, Intel MPI)."""
    job = None
    if variables.has("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"):
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
        job = variables.text("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE")
        implementation = "Open MPI"
    elif variables.has("PMI_RANK", "PMI_SIZE") and (
        # srun --mpi=pmi2 sets PMI_RANK and PMI_SIZE as well, but in a step and without the others.
        variables.has("MPI_LOCALRANKID", "MPI_LOCALNRANKS") or not is_in_step(variables)
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
        job = job or f"child of {os.getppid()}"
    elif not variables.has("MASTER_ADDR"):
        variables.problems.append(
            f"MASTER_ADDR is missing, and only {local_world} of {world} ranks are on this machine. "
            "Name the machine of rank 0: mpirun -x MASTER_ADDR=HOST (MPICH and Intel MPI: -genv "
            "MASTER_ADDR HOST)."
        )
    address, port = rendezvous_address(variables, host, job)
    return RankInfo(rank, world, local_rank, local_world, "mpi", address, port, reason)


def mpi_tasks(variables: Variables) -> int | None:
    """Return the number of ranks that mpirun started; None where mpirun is not involved."""
    return variables.number("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def from_slurm(variables: Variables) -> RankInfo | None:
    """Read the variables of a Slurm step, which srun has started."""
    if not is_in_step(variables):
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
    address, port = rendezvous_address(variables, host, name)
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
    if is_step_of_daemons or not is_in_step(variables):
        return None
    return variables.number(*STEP_TASKS)


def mpirun_is_here(variables: Variables) -> bool | None:
    """Return True if mpirun is this process's parent, False if one of its daemons is.

    None: the variables do not say it (all but Open MPI 4).
    """
    parent_uri = variables.text("OMPI_MCA_orte_local_daemon_uri")
    mpirun_uri = variables.text("OMPI_MCA_orte_hnp_uri")
    return None if parent_uri is None else parent_uri == mpirun_uri


def is_in_step(variables: Variables) -> bool:
    step = variables.text("SLURM_STEP_ID", "SLURM_STEPID")
    return step is not None and step.isdecimal() and int(step) < FIRST_SPECIAL_STEP


def first_host(nodelist: str) -> str:
    """Return the first host of a list: `n01` of `n[01-04,07],m3`.

    A name may have several brackets, as in `rack[1-2]-n[1-9]`.

    Raises:
        ValueError: the list has no host.
    """
    # Replace each bracket by its first member; then the first comma ends the first name.
    host = re.sub(r"\[(\w+)[^\]]*\]", r"\1", nodelist.strip()).split(",")[0]
    if not re.fullmatch(r"[\w.-]+", host):
        raise ValueError(f"'{nodelist}' is no list of hosts")
    return host


def counts(text: str) -> list[int]:
    """Return the counts of a compressed list: [2, 2, 2, 1] of `2(x3),1`.

    Raises:
        ValueError: the text is not of that form.
    """
    values: list[int] = []
    for item in text.split(","):
        match = COUNT.fullmatch(item.strip())
        if match is None:
            raise ValueError(f"'{text}' is no list of counts such as 2(x3),1")
        count, repeat = match.groups(default="1")
        values += [int(count)] * int(repeat)
    return values


def from_rank_variables(variables: Variables) -> RankInfo | None:
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


READERS: Mapping[str, Callable[[Variables], RankInfo | None]] = {
    "local": from_shoal_env,
    "torchrun": from_torchrun,
    "mpi": from_mpi,
    "slurm": from_slurm,
    "environment": from_rank_variables,
    "single": single_process,
}
