"""Which rank this process is: read from the variables of whatever launched it, or refused, never
guessed.

This is the only module that reads launchers' variables. `read` asks in this order, innermost
launcher first, and the first that is there decides:

1. **Shoal's own launcher**: SHOAL_LAUNCHER=local, with RANK, WORLD_SIZE, LOCAL_RANK,
   LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Nothing else is looked at, because whatever
   surrounds it (a Slurm job, say) only started the launcher.
2. **torchrun**: TORCHELASTIC_RUN_ID, with the same six, and GROUP_WORLD_SIZE, its number of agents.
3. **mpirun**: Open MPI's OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE; or, where Hydra
   started the rank (MPICH, Intel MPI), PMI_RANK and PMI_SIZE with MPI_LOCALRANKID and
   MPI_LOCALNRANKS. It comes before Slurm because mpirun starts its daemons as a Slurm step: that
   step's variables describe the daemons, not the ranks.
4. **A Slurm step**, that is `srun`: SLURM_STEP_ID and SLURM_PROCID, with SLURM_STEP_NUM_TASKS (else
   SLURM_NTASKS), SLURM_LOCALID, SLURM_NODEID, SLURM_STEP_TASKS_PER_NODE and SLURM_STEP_NODELIST.
   The shell of an `salloc` and the script of an `sbatch` are no step: they lack SLURM_STEP_ID, or
   have one of the numbers that Slurm keeps for them.
5. **RANK and WORLD_SIZE** alone, set by hand or by a cluster's operator, with MASTER_ADDR and
   MASTER_PORT. LOCAL_RANK and LOCAL_WORLD_SIZE are 0 and 1 where they are missing: one rank on each
   machine.
6. Nothing of these: a **single** process. So is a Slurm step or an mpirun of one task.

Where ranks meet: MASTER_ADDR and MASTER_PORT are taken where they are set. Else it is the first
host of the step, or 127.0.0.1 where all ranks are on one machine, at a port that follows from the
job's id, outside the range from which systems hand out ports. Where rank 0 need not be on the first
host, or there is no list of hosts, MASTER_ADDR is needed.

Refused, with all that is wrong at once: numbers that are none; a rank outside its world; variables
that are missing; in every task of a step a torchrun or mpirun of its own, which would be several
worlds; a step's variables that were left over in the script of another job; RANK or WORLD_SIZE that
say something else than mpirun or the step; a world that is not SHOAL_EXPECTED_WORLD.

SHOAL_LAUNCHER=single, torchrun, mpi, slurm or environment overrides the order and asks only that
one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from shoal.errors import EnvironmentConflict, did_you_mean
from shoal.launch import launchers
from shoal.launch.rank_info import RankInfo
from shoal.launch.variables import Variables

__all__ = ["RankInfo", "read"]

READERS: Mapping[str, Callable[[Variables], RankInfo | None]] = {
    "local": launchers.from_shoal_env,
    "torchrun": launchers.torchrun,
    "mpi": launchers.mpi,
    "slurm": launchers.slurm,
    "environment": launchers.environment,
    "single": launchers.single_process,
}


def read(environ: Mapping[str, str], parent_pid: int | None = None) -> RankInfo:
    """This process's place in its world. `shoal train -n N` under another launcher adds
    SHOAL_EXPECTED_WORLD=N.

    Args: environ: usually os.environ. parent_pid: this process's parent if None. It makes the port
        where mpirun leaves no id of its own (Hydra), as
            all ranks on a machine are children of one daemon.

    Raises: EnvironmentConflict: the variables contradict each other; the message holds all that is
        wrong.
    """
    variables = Variables(environ, os.getppid() if parent_pid is None else parent_pid)
    asked = variables.text("SHOAL_LAUNCHER")
    if asked is not None and asked not in READERS:
        raise EnvironmentConflict(
            f"SHOAL_LAUNCHER={asked} is no launcher; {did_you_mean(asked, READERS)}."
        )
    place = READERS[asked](variables) if asked else _innermost(variables)
    if place is None:
        raise EnvironmentConflict(
            f"SHOAL_LAUNCHER={asked} was asked for, but its variables are not set."
        )
    if not variables.problems:  # else the numbers may be stand-ins
        _check_numbers(variables, place)
    if variables.problems:
        lines = [
            f"The launcher's variables contradict each other ({place.reason}):",
            *variables.problems,
        ]
        raise EnvironmentConflict("\n  ".join(dict.fromkeys(lines)))
    return place


def _innermost(variables: Variables) -> RankInfo:
    place = launchers.torchrun(variables) or launchers.mpi(variables) or launchers.slurm(variables)
    if place is None:
        return launchers.environment(variables) or launchers.single_process(variables)
    if place.launcher == "torchrun":
        agents = variables.number("GROUP_WORLD_SIZE") or place.world
        _check_outer_tasks(
            variables,
            place,
            agents,
            launchers.mpi_tasks(variables),
            launchers.step_tasks(variables),
        )
        return place
    if place.launcher == "mpi":
        agents = 1 if launchers.mpirun_is_here(variables) else place.world
        _check_outer_tasks(variables, place, agents, launchers.step_tasks(variables))
    if (
        place.world == 1 and not variables.problems
    ):  # its one task may be a shell in which something else was set
        return launchers.environment(variables) or launchers.single_process(variables)
    _check_agreement(variables, place)
    return place


def _check_outer_tasks(
    variables: Variables, place: RankInfo, agents: int, *outer_tasks: int | None
) -> None:
    """An inner launcher that has only itself, in each of an outer launcher's tasks: several
    worlds, all of rank 0.
    """
    inner, cure = "mpirun", "Start mpirun once, outside of srun"
    for tasks in outer_tasks:
        if agents != 1 or tasks is None or tasks == 1:
            continue
        if place.launcher == "torchrun":
            inner, cure = (
                "torchrun",
                f"Give torchrun --nnodes={tasks} and one --rdzv-endpoint for all",
            )
        variables.problems.append(
            f"Each of {tasks} tasks of an outer launcher has {inner} of its own, which knows of no "
            "other: that makes "
            f"{tasks} separate worlds. {cure}, or leave {inner} out and let Shoal read the tasks. "
            f"If separate runs are meant, set SHOAL_LAUNCHER={place.launcher}."
        )


def _check_agreement(variables: Variables, place: RankInfo) -> None:
    """RANK and WORLD_SIZE may have been exported too, but must not say something else."""
    for name, value in (("RANK", place.rank), ("WORLD_SIZE", place.world)):
        if variables.number(name) not in (None, value):
            variables.problems.append(
                f"{name}={variables.text(name)} is set, but it is {value} according to "
                f"{place.launcher} "
                f"({place.reason}). Unset {name}, or set SHOAL_LAUNCHER=environment if it is right."
            )


def _check_numbers(variables: Variables, place: RankInfo) -> None:
    local = f"local rank {place.local_rank} of {place.local_world} on this machine"
    if place.rank >= place.world:
        variables.problems.append(
            f"rank {place.rank} is outside a world of {place.world}; ranks count from 0."
        )
    if place.local_rank >= place.local_world or place.local_world > place.world:
        variables.problems.append(f"{local} does not fit a world of {place.world}.")
    if place.master_port is not None and not 0 < place.master_port < 1 << 16:
        variables.problems.append(
            f"MASTER_PORT={place.master_port} is no port; use one between 1024 and 65535."
        )
    expected = variables.number("SHOAL_EXPECTED_WORLD")
    if expected not in (None, place.world):
        variables.problems.append(
            f"{expected} processes were asked for, but this is a world of {place.world}. Start "
            f"{expected} with the "
            f"same launcher, or ask for {place.world}."
        )
