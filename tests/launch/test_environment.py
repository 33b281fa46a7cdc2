from __future__ import annotations

import os

import launcher_environments as recorded
import pytest
from launcher_environments import (
    OPEN_MPI,
    OPEN_MPI_IN_SALLOC,
    STEP,
    TORCHRUN_IN_EVERY_TASK,
    TORCHRUN_IN_STEP,
)

from shoal.errors import EnvironmentConflict
from shoal.launch.environment import RANK_PROCESS, own_place, read
from shoal.launch.rank_info import FIRST_PORT, PORTS

SHOAL = {
    "SHOAL_LAUNCHER": "local",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "3",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "41234",
}
# As the documentation of these three has it; nothing was recorded.
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
MPICH = {
    "PMI_RANK": "1",
    "PMI_SIZE": "2",
    "PMI_FD": "9",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
INTEL_MPI = MPICH | {"I_MPI_INFO_NP": "2", "I_MPI_MPIRUN": "mpirun", "MPI_LOCALNRANKS": "2"}
BY_HAND = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n01", "MASTER_PORT": "29500"}
OF_ONE = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
MASTER = {"MASTER_ADDR": "n3"}


def without(environ: dict[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "launcher", "rank_of_world", "local", "address"),
    [
        ({}, "single", (0, 1), (0, 1), None),
        (SHOAL, "shoal", (3, 4), (3, 4), "127.0.0.1"),
        (STEP | SHOAL, "shoal", (3, 4), (3, 4), "127.0.0.1"),
        (TORCHRUN_IN_STEP, "torchrun", (2, 4), (0, 2), "localhost"),
        (recorded.TORCHRUN_IN_SALLOC, "torchrun", (1, 2), (1, 2), "localhost"),
        (recorded.BATCH_SCRIPT, "single", (0, 1), (0, 1), None),
        (recorded.SALLOC_SHELL, "single", (0, 1), (0, 1), None),
        (recorded.INTERACTIVE_SHELL, "single", (0, 1), (0, 1), None),
        (recorded.PTY_STEP, "single", (0, 1), (0, 1), None),
        (recorded.PTY_STEP | BY_HAND, "environment", (1, 2), (0, 1), "n01"),
        (STEP, "slurm", (3, 5), (1, 2), "n1"),
        (STEP | {"MASTER_ADDR": "n2", "WORLD_SIZE": "5"}, "slurm", (3, 5), (1, 2), "n2"),
        (
            STEP
            | {"SLURM_PROCID": "4", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_GTIDS": "4"},
            "slurm",
            (4, 5),
            (0, 1),
            "n1",
        ),
        (without(STEP, "SLURM_GTIDS", "SLURM_NTASKS"), "slurm", (3, 5), (1, 2), "n1"),
        (recorded.SMALL_STEP, "slurm", (1, 2), (1, 2), "127.0.0.1"),
        (recorded.PMI2_STEP, "slurm", (1, 2), (0, 1), "n1"),
        (recorded.ARBITRARY_STEP | MASTER, "slurm", (0, 4), (0, 2), "n3"),
        (recorded.HETEROGENEOUS_STEP | MASTER, "slurm", (0, 2), (0, 1), "n3"),
        (
            without(recorded.LEFT_OVER_STEP, "SLURM_STEP_ID", "SLURM_STEPID"),
            "single",
            (0, 1),
            (0, 1),
            None,
        ),
        (OPEN_MPI, "mpi", (1, 3), (1, 3), "127.0.0.1"),
        (OPEN_MPI | OF_ONE, "single", (0, 1), (0, 1), None),
        (OPEN_MPI_IN_SALLOC | {"MASTER_ADDR": "n1"}, "mpi", (2, 3), (0, 1), "n1"),
        (recorded.ONE_OPEN_MPI_IN_SALLOC, "single", (0, 1), (0, 1), None),
        (
            recorded.ONE_OPEN_MPI_IN_SALLOC | recorded.TORCHRUN_IN_SALLOC,
            "torchrun",
            (1, 2),
            (1, 2),
            "localhost",
        ),
        (OPEN_MPI_5 | {"MASTER_ADDR": "n01"}, "mpi", (2, 4), (0, 2), "n01"),
        (STEP | OPEN_MPI_5 | {"MASTER_ADDR": "n01"}, "mpi", (2, 4), (0, 2), "n01"),
        (MPICH, "mpi", (1, 2), (1, 2), "127.0.0.1"),
        (INTEL_MPI, "mpi", (1, 2), (1, 2), "127.0.0.1"),
        (BY_HAND, "environment", (1, 2), (0, 1), "n01"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "environment", (0, 1), (0, 1), None),
        (STEP | {"SHOAL_LAUNCHER": "single"}, "single", (0, 1), (0, 1), None),
        (
            TORCHRUN_IN_EVERY_TASK | {"SHOAL_LAUNCHER": "torchrun"},
            "torchrun",
            (0, 1),
            (0, 1),
            "localhost",
        ),
        (
            recorded.OPEN_MPI_IN_EVERY_TASK | {"SHOAL_LAUNCHER": "mpi"},
            "mpi",
            (0, 1),
            (0, 1),
            "127.0.0.1",
        ),
    ],
)
def test_each_launcher_is_read_by_its_own_variables(
    environ, launcher, rank_of_world, local, address
):
    info = read(environ)
    assert info.launcher == launcher
    assert (info.rank, info.world) == rank_of_world
    assert (info.local_rank, info.local_world) == local
    assert info.master_address == address


@pytest.mark.parametrize(
    ("environ", "problems"),
    [
        (TORCHRUN_IN_EVERY_TASK, ["Each of 2 tasks", "--nnodes=2", "SHOAL_LAUNCHER=torchrun"]),
        (
            TORCHRUN_IN_EVERY_TASK | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            ["Each of 2 tasks"],
        ),
        (OPEN_MPI | TORCHRUN_IN_EVERY_TASK, ["Each of 3 tasks"]),
        (
            recorded.OPEN_MPI_IN_EVERY_TASK,
            ["Each of 2 tasks", "outside of srun", "SHOAL_LAUNCHER=mpi"],
        ),
        (STEP | OPEN_MPI, ["Each of 5 tasks", "5 separate worlds"]),
        (STEP | OPEN_MPI_5 | OF_ONE | {"OMPI_COMM_WORLD_LOCAL_RANK": "0"}, ["Each of 5 tasks"]),
        (
            recorded.LEFT_OVER_STEP,
            ["2 tasks, 1 of them here", "SLURM_NTASKS=1", "unset SLURM_STEP_ID"],
        ),
        (
            recorded.LEFT_OVER_STEP | {"SLURM_NTASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"},
            ["SLURM_GTIDS=0", "unset"],
        ),
        (recorded.ARBITRARY_STEP, ["MASTER_ADDR is missing", "arbitrary"]),
        (recorded.HETEROGENEOUS_STEP, ["MASTER_ADDR is missing", "heterogeneous"]),
        (
            without(STEP, "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NODELIST"),
            [
                "SLURM_PROCID is missing",
                "SLURM_LOCALID is missing",
                "SLURM_STEP_NODELIST is missing",
            ],
        ),
        (
            without(STEP, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
            ["SLURM_STEP_NUM_TASKS is missing"],
        ),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, ["2(x2) does not fit", "5 tasks"]),
        (STEP | {"SLURM_STEP_TASKS_PER_NODE": "two"}, ["'two' is no list of counts"]),
        (
            STEP | {"RANK": "0", "WORLD_SIZE": "2"},
            ["RANK=0 is set, but it is 3", "WORLD_SIZE=2 is set, but it is 5"],
        ),
        (
            without(OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_RANK"),
            ["OMPI_COMM_WORLD_LOCAL_RANK is missing"],
        ),
        (OPEN_MPI_IN_SALLOC, ["MASTER_ADDR is missing", "1 of 3 ranks", "mpirun -x MASTER_ADDR"]),
        (MPICH | {"PMI_SIZE": "4", "MASTER_ADDR": "n01"}, ["MASTER_PORT is missing"]),
        (
            {"PMI_RANK": "1", "PMI_SIZE": "2"},
            ["MPI_LOCALRANKID is missing", "MPI_LOCALNRANKS is missing"],
        ),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "n01"}, ["RANK is missing", "MASTER_PORT is missing"]),
        ({"RANK": "0"}, ["WORLD_SIZE is missing"]),
        (BY_HAND | {"RANK": "2"}, ["rank 2 is outside a world of 2"]),
        (BY_HAND | {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}, ["local rank 1 of 1"]),
        (
            BY_HAND | {"RANK": "one", "WORLD_SIZE": "-2"},
            ["RANK=one is not", "WORLD_SIZE=-2 is not"],
        ),
        (BY_HAND | {"MASTER_PORT": "99999"}, ["MASTER_PORT=99999 is no port"]),
        (without(SHOAL, "MASTER_PORT", "RANK"), ["MASTER_PORT is missing", "RANK is missing"]),
        ({"SHOAL_LAUNCHER": "torchrum"}, ["did you mean 'torchrun'"]),
        ({"SHOAL_LAUNCHER": "slurm"}, ["SHOAL_LAUNCHER=slurm was asked for"]),
    ],
)
def test_a_contradictory_environment_is_refused_with_all_problems(environ, problems):
    with pytest.raises(EnvironmentConflict) as error:
        read(environ)
    assert [problem for problem in problems if problem not in str(error.value)] == []


@pytest.mark.parametrize(("environ", "asked"), [(SHOAL, 8), (recorded.TORCHRUN_IN_SALLOC, 4)])
def test_a_command_for_another_number_of_processes_is_refused(monkeypatch, environ, asked):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(RANK_PROCESS, "")
    world = read(environ).world
    assert own_place(world).world == world
    with pytest.raises(EnvironmentConflict, match=f"{asked} processes .* a world of {world} "):
        own_place(asked)


@pytest.mark.parametrize(
    ("environ", "sibling", "other"),
    [
        (STEP, {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, {"SLURM_STEP_ID": "1"}),
        (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2"}, {"OMPI_MCA_ess_base_jobid": "7"}),
    ],
)
def test_ranks_of_one_job_derive_one_port_and_other_jobs_another(environ, sibling, other):
    port = read(environ).master_port
    assert port in range(FIRST_PORT, FIRST_PORT + PORTS)
    assert read(environ | sibling).master_port == port
    assert read(environ | other).master_port != port


def test_ranks_of_mpich_derive_their_port_from_their_common_parent(monkeypatch):
    sibling = MPICH | {"PMI_RANK": "0", "MPI_LOCALRANKID": "0"}
    ports = []
    for parent, environ in ((71, MPICH), (71, sibling), (72, MPICH)):
        monkeypatch.setattr(os, "getppid", lambda parent=parent: parent)
        ports.append(read(environ).master_port)
    assert ports[0] == ports[1] != ports[2]


def test_a_rank_info_describes_itself_in_one_line():
    assert read({}).describe() == "1 process (no launcher's variables are set)"
    text = read(STEP | {"MASTER_PORT": "29511"}).describe()
    assert (
        text == "rank 3 of 5 (1 of 2 on this machine), meeting at n1:29511; step 0 of Slurm job 3"
    )


def test_a_job_without_a_step_says_how_to_start_its_tasks():
    assert "srun" in read(recorded.BATCH_SCRIPT).describe()


def test_a_tf_config_alone_is_refused_and_a_rank_beside_it_counts() -> None:
    environ = {"TF_CONFIG": '{"cluster": {"worker": ["n0:2222", "n1:2223"]}}'}
    with pytest.raises(EnvironmentConflict, match="TF_CONFIG is set, which is not read"):
        read(environ)
    assert read(environ | {"SHOAL_LAUNCHER": "single"}).world == 1
    place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "2222"}
    assert read(environ | place).rank == 1
