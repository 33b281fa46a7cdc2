"""The variables by which a Slurm step, which srun has started, tells a process its rank.

Slurm has two compressed notations: lists of hosts and lists of counts.
"""

from __future__ import annotations

import re

from shoal.launch.rank_info import LOOPBACK, RankInfo, Variables, rendezvous_address

# Slurm gives step ids from here on to batch scripts, interactive shells and the like.
FIRST_SPECIAL_STEP = 0xFFFF_FF00
# The interactive step of an salloc has the SLURM_NTASKS of its job: ask for the step's first.
STEP_TASKS = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def slurm(variables: Variables) -> RankInfo | None:
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
