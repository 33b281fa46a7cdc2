"""The variables by which each launcher tells a process its rank.

Each function reads one launcher. It returns None where that launcher did not start this process.
`environment.read` defines the order in which they are asked.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.launch.private_memory import STORE
from shoal.launch.rank_info import LOOPBACK, Launcher, RankInfo, Variables, rendezvous_address
from shoal.launch.slurm.variables import is_in_step, step_tasks


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
        job = job or f"child of {variables.parent_pid}"
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
