"""Variable sets as the launchers set them (Slurm 22 and 24, Open MPI 4 and 5, MPICH, Intel MPI, torchrun)."""

from __future__ import annotations

import pytest

from shoal.errors import EnvironmentConflict
from shoal.launch.environment import read
from shoal.launch.launchers import FIRST_PORT, PORTS

SHOAL = {
    "SHOAL_LAUNCHER": "local",
    "SHOAL_EXPECTED_WORLD": "4",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "41234",
}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "n01",
    "MASTER_PORT": "29500",
}
TORCHRUN_OF_ONE = TORCHRUN | {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
}
JOB = {
    "SLURM_JOB_ID": "123456",
    "SLURM_JOBID": "123456",
    "SLURM_JOB_NODELIST": "n[01-04,07],m3",
    "SLURM_NODELIST": "n[01-04,07],m3",
    "SLURM_NNODES": "6",
    "SLURM_NTASKS": "11",
    "SLURM_NPROCS": "11",
    "SLURM_TASKS_PER_NODE": "2(x5),1",
}
# What the script of an sbatch sees: the batch step's own rank, and no step id.
BATCH_SCRIPT = JOB | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_GTIDS": "0"}
STEP_22 = JOB | {
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "11",
    "SLURM_STEP_NUM_NODES": "6",
    "SLURM_STEP_NODELIST": "n[01-04,07],m3",
    "SLURM_STEP_TASKS_PER_NODE": "2(x5),1",
    "SLURM_STEP_LAUNCHER_PORT": "43210",
    "SLURM_SRUN_COMM_HOST": "10.0.0.1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.1",
}
# A step that is smaller than its job, on one machine of it, with the PMI variables of srun --mpi=pmi2.
STEP_24 = JOB | {
    "SLURM_STEP_ID": "3",
    "SLURM_STEPID": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "n02",
    "SLURM_STEP_TASKS_PER_NODE": "4",
    "SLURM_NTASKS": "4",
    "PMI_FD": "9",
    "PMI_JOBID": "123456.3",
    "PMI_RANK": "1",
    "PMI_SIZE": "4",
}
# salloc with use_interactive_step: the shell is a step of a kept number, with the whole job's SLURM_NTASKS.
INTERACTIVE_STEP = JOB | {"SLURM_STEP_ID": "4294967290", "SLURM_STEPID": "4294967290", "SLURM_PROCID": "0"}
PTY_STEP = STEP_24 | {
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "PMI_RANK": "0",
    "PMI_SIZE": "1",
}
OPEN_MPI_4 = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "OMPI_UNIVERSE_SIZE": "8",
    "OMPI_MCA_ess_base_jobid": "1934622721",
    "OMPI_MCA_ess_base_vpid": "1",
    "OMPI_MCA_orte_num_nodes": "1",
    "PMIX_NAMESPACE": "1934622721",
    "PMIX_RANK": "1",
}
OPEN_MPI_5 = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "PMIX_NAMESPACE": "prterun-n01-31337@1",
    "PMIX_RANK": "2",
    "PRTE_LAUNCHED": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "PMI_FD": "9", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
INTEL_MPI = MPICH | {"I_MPI_INFO_NP": "2", "I_MPI_MPIRUN": "mpirun", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n01", "MASTER_PORT": "29500"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank_of_world", "local", "address"),
    [
        ({}, "single", (0, 1), (0, 1), None),
        (SHOAL, "shoal", (3, 4), (3, 4), "127.0.0.1"),
        (STEP_22 | SHOAL, "shoal", (3, 4), (3, 4), "127.0.0.1"),
        (TORCHRUN, "torchrun", (5, 8), (1, 4), "n01"),
        (TORCHRUN_OF_ONE, "torchrun", (0, 1), (0, 1), "n01"),
        (BATCH_SCRIPT | TORCHRUN_OF_ONE, "torchrun", (0, 1), (0, 1), "n01"),
        (STEP_22 | TORCHRUN, "torchrun", (5, 8), (1, 4), "n01"),
        (JOB, "single", (0, 1), (0, 1), None),
        (BATCH_SCRIPT, "single", (0, 1), (0, 1), None),
        (INTERACTIVE_STEP, "single", (0, 1), (0, 1), None),
        (PTY_STEP, "single", (0, 1), (0, 1), None),
        (PTY_STEP | BY_HAND, "environment", (1, 2), (0, 1), "n01"),
        (STEP_22, "slurm", (5, 11), (1, 2), "n01"),
        (STEP_22 | {"SLURM_PROCID": "10", "SLURM_LOCALID": "0", "SLURM_NODEID": "5"}, "slurm", (10, 11), (0, 1), "n01"),
        (STEP_22 | {"MASTER_ADDR": "n07", "WORLD_SIZE": "11"}, "slurm", (5, 11), (1, 2), "n07"),
        (STEP_24, "slurm", (1, 4), (1, 4), "127.0.0.1"),
        (OPEN_MPI_4, "mpi", (1, 4), (1, 4), "127.0.0.1"),
        (OPEN_MPI_5 | {"MASTER_ADDR": "n01"}, "mpi", (2, 4), (0, 2), "n01"),
        (MPICH, "mpi", (1, 2), (1, 2), "127.0.0.1"),
        (INTEL_MPI, "mpi", (1, 2), (1, 2), "127.0.0.1"),
        # mpirun starts its daemons as a step of one task a node; each daemon's variables reach its ranks.
        (STEP_22 | OPEN_MPI_5 | {"MASTER_ADDR": "n01"}, "mpi", (2, 4), (0, 2), "n01"),
        (
            OPEN_MPI_4 | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            "mpi",
            (0, 4),
            (0, 4),
            "127.0.0.1",
        ),
        (BY_HAND, "environment", (1, 2), (0, 1), "n01"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "environment", (0, 1), (0, 1), None),
        (STEP_22 | {"SHOAL_LAUNCHER": "single"}, "single", (0, 1), (0, 1), None),
        (STEP_22 | TORCHRUN_OF_ONE | {"SHOAL_LAUNCHER": "torchrun"}, "torchrun", (0, 1), (0, 1), "n01"),
    ],
)
def test_each_launcher_is_read_by_its_own_variables(environ, launcher, rank_of_world, local, address):
    place = read(environ)
    assert place.launcher == launcher
    assert (place.rank, place.world) == rank_of_world
    assert (place.local_rank, place.local_world) == local
    assert place.master_address == address


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (STEP_22 | TORCHRUN_OF_ONE, ["Each of 11 tasks", "--nnodes=11", "SHOAL_LAUNCHER=torchrun"]),
        (OPEN_MPI_4 | TORCHRUN_OF_ONE, ["Each of 4 tasks"]),
        (STEP_22 | TORCHRUN | {"GROUP_WORLD_SIZE": "1"}, ["Each of 11 tasks"]),
        (STEP_22 | OPEN_MPI_4 | {f"OMPI_COMM_WORLD_{n}SIZE": "1" for n in ("", "LOCAL_")}, ["Each of 11 tasks"]),
        (
            without(STEP_22, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"),
            ["SLURM_PROCID is missing", "SLURM_LOCALID is missing", "SLURM_STEP_NODELIST is missing"],
        ),
        (without(STEP_22, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), ["SLURM_STEP_NUM_TASKS is missing"]),
        (STEP_22 | {"SLURM_STEP_TASKS_PER_NODE": "2(x5)"}, ["2(x5) does not fit", "11 tasks"]),
        (STEP_22 | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["'two' is no list of counts"]),
        (
            STEP_22 | {"RANK": "0", "WORLD_SIZE": "2"},
            ["RANK=0 is set, but it is 5", "WORLD_SIZE=2 is set, but it is 11"],
        ),
        (without(OPEN_MPI_4, "OMPI_COMM_WORLD_LOCAL_RANK"), ["OMPI_COMM_WORLD_LOCAL_RANK is missing"]),
        (OPEN_MPI_5, ["MASTER_ADDR is missing", "2 of 4 ranks", "mpirun -x MASTER_ADDR"]),
        (MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "n01"}, ["MASTER_PORT is missing"]),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, ["MPI_LOCALRANKID is missing", "MPI_LOCALNRANKS is missing"]),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "n01"}, ["RANK is missing", "MASTER_PORT is missing"]),
        ({"RANK": "0"}, ["WORLD_SIZE is missing"]),
        (BY_HAND | {"RANK": "2"}, ["rank 2 is outside a world of 2"]),
        (BY_HAND | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["local rank 1 of 1"]),
        (BY_HAND | {"RANK": "one", "WORLD_SIZE": "-2"}, ["RANK=one is not", "WORLD_SIZE=-2 is not"]),
        (BY_HAND | {"MASTER_PORT": "99999"}, ["MASTER_PORT=99999 is no port"]),
        (SHOAL | {"SHOAL_EXPECTED_WORLD": "8"}, ["8 processes were asked for", "a world of 4"]),
        (TORCHRUN_OF_ONE | {"SHOAL_EXPECTED_WORLD": "2"}, ["2 processes were asked for", "a world of 1"]),
        ({"SHOAL_EXPECTED_WORLD": "2"}, ["2 processes were asked for", "a world of 1"]),
        (without(SHOAL, "MASTER_PORT", "RANK"), ["MASTER_PORT is missing", "RANK is missing"]),
        ({"SHOAL_LAUNCHER": "torchrum"}, ["did you mean 'torchrun'"]),
        ({"SHOAL_LAUNCHER": "slurm"}, ["SHOAL_LAUNCHER=slurm was asked for"]),
    ],
)
def test_a_contradictory_environment_is_refused_with_all_that_is_wrong(environ, said):
    with pytest.raises(EnvironmentConflict) as error:
        read(environ)
    assert [part for part in said if part not in str(error.value)] == []


@pytest.mark.parametrize(
    ("environ", "sibling", "other"),
    [
        (STEP_22, {"SLURM_PROCID": "4", "SLURM_LOCALID": "0"}, {"SLURM_STEP_ID": "1"}),
        (OPEN_MPI_4, {"OMPI_COMM_WORLD_RANK": "2"}, {"OMPI_MCA_ess_base_jobid": "7"}),
    ],
)
def test_ranks_of_one_job_derive_one_port_and_other_jobs_another(environ, sibling, other):
    port = read(environ).master_port
    assert port in range(FIRST_PORT, FIRST_PORT + PORTS)
    assert read(environ | sibling).master_port == port
    assert read(environ | other).master_port != port


def test_ranks_of_mpich_derive_their_port_from_their_common_parent():
    sibling = MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    assert read(MPICH, parent_pid=71).master_port == read(sibling, parent_pid=71).master_port
    assert read(MPICH, parent_pid=71).master_port != read(MPICH, parent_pid=72).master_port


def test_a_place_describes_itself_in_one_line():
    assert read({}).describe() == "1 process (no launcher's variables are set)"
    said = read(STEP_22 | {"MASTER_PORT": "29511"}).describe()
    assert said == "rank 5 of 11 (1 of 2 on this machine), meeting at n01:29511; step 0 of Slurm job 123456"


def test_a_job_without_a_step_says_how_to_start_its_tasks():
    assert "srun" in read(BATCH_SCRIPT).describe()
