"""The tests that only the slow suites run: the mechanism that each file of them guards.

The first word is the folder or file of `shoal/` whose change asks for them; `make affected` prints
the targets for what has changed. tests/project/test_suites.py keeps the list complete.
"""

from __future__ import annotations

from typing import NamedTuple


class SlowCases(NamedTuple):
    """The slow cases of one file of tests.

    Attributes:
        tests: the file, below tests/.
        mechanism: folders and files that the cases guard, below shoal/ or, by tests/, at the root.
        what: what only they show.
        target: of make; `test-slow` where the file is one of many.
    """

    tests: str
    mechanism: str
    what: str
    target: str = "test-slow"

    def guarded(self) -> list[str]:
        """Return the folders and files of the mechanism, from the root."""
        places = self.mechanism.split()
        return [name if name.startswith("tests/") else f"shoal/{name}" for name in places]


FAULTS, COLLECTIVES, REAL = "test-faults", "test-collectives", "test-real"

SLOW_CASES = tuple(
    SlowCases(*row)
    for row in (
        ("bad_input/test_odd_commands.py", "cli config", "a thousand odd commands, as processes"),
        ("checkpoint/test_async_save.py", "checkpoint", "saves beside training, killed"),
        ("checkpoint/test_checkpoint_kill.py", "checkpoint", "a first save that is killed"),
        ("cli/test_cli.py", "cli models data", "models and data of one's own"),
        ("cli/test_first_commands.py", "cli launch", "other spellings of the same flags"),
        ("cli/test_missing_packages.py", "cli train", "an experiment without extras"),
        ("cli/test_plan.py", "cli planner", "the screen of a plan"),
        ("comm/test_algorithms.py", "comm", "means over other lists of hosts"),
        ("comm/test_mesh.py", "comm", "the mesh as torch sees it"),
        ("data/test_prefetched_batches.py", "data run", "loops that fetch ahead"),
        ("data/test_sample_lists.py", "data", "lists of samples under every collate function"),
        ("data/test_sharding.py", "data", "a sampler of 1e10 indices"),
        ("data/test_streams.py", "data", "streams read by two workers"),
        ("doctor/test_doctor.py", "doctor", "a wrong sum of one rank"),
        ("examples/test_examples.py", "run train", "each example on one process and on three"),
        ("hosts/test_launch_on_hosts.py", "launch/hosts", "a launch over ssh that fails", REAL),
        ("hosts/test_real_hosts.py", "launch/hosts", "agents on real ssh servers", REAL),
        ("hosts/test_real_launches.py", "launch/hosts", "signals and ends over ssh", REAL),
        ("hosts/test_real_runs.py", "launch/hosts train", "trained runs on three hosts", REAL),
        ("hosts/test_scale_on_hosts.py", "launch/hosts", "a world that grows by a host", REAL),
        ("hosts/test_separate_disks.py", "launch/hosts", "hosts without a shared disk", REAL),
        ("hosts/test_server_hosts.py", "launch/hosts parameter_server", "--server-hosts", REAL),
        ("hosts/test_servers_on_hosts.py", "parameter_server", "servers on other hosts", REAL),
        ("hosts/test_simulated_sessions.py", "launch/hosts", "20,000 schedules of lost lines"),
        ("hosts/test_train_on_hosts.py", "launch/hosts train", "`shoal train --hosts`", REAL),
        ("kubernetes/test_manifest.py", "launch", "two pods of the manifest"),
        (
            "integrations/test_example_scripts.py",
            "integrations trial",
            "the example scripts of transformers",
        ),
        ("launch/test_hangs.py", "watchdog launch", "a rank that hangs in each phase"),
        ("launch/test_helper_spawner.py", "launch", "a thousand helper processes"),
        ("launch/test_local_launch.py", "launch", "a hundred ranks"),
        ("launch/test_run_script.py", "launch", "a program that a rank starts by itself"),
        ("launch/test_script_worlds.py", "launch", "worlds of scripts in forks"),
        ("launch/test_under_launchers.py", "launch", "ranks under mpirun and srun", REAL),
        ("mutants/test_mutants.py", "verification trial", "all planted bugs", "mutants"),
        ("optim/test_adamw8bit.py", "optim", "8-bit AdamW under every strategy"),
        ("optim/test_traits.py", "optim strategies", "declared traits under other strategies"),
        (
            "parameter_server/test_recorded_order.py",
            "parameter_server",
            "notes of a recorder that are lost",
        ),
        (
            "parameter_server/worker/test_session_schedules.py",
            "parameter_server",
            "1,000 schedules",
        ),
        ("planner/test_auto_strategy.py", "planner run", "auto of shoal.init under torchrun"),
        ("planner/test_memory_of_ranks.py", "costs planner", "memory of other strategies"),
        ("planner/test_script_plans.py", "planner", "scripts of other forms, planned"),
        ("planner/test_trace_model.py", "planner", "segments of a traced model"),
        ("platform/test_other_systems.py", "platform launch", "strategies on systems but Linux"),
        ("platform/test_torchvision_import.py", "platform", "a torchvision that failed before"),
        ("plotting/test_plots.py", "plotting", "panels of a picture"),
        ("project/test_harness.py", "tests/harness", "the run around the tests, by planted faults"),
        ("project/test_lessons.py", "run strategies", "one loss under each strategy of the README"),
        ("project/test_packaging.py", "shm_backend", "two ranks without the compiled part"),
        ("project/test_sum_order.py", "tests/harness", "wide products under another order"),
        ("run/guards/test_forward_writes.py", "run/guards", "written weights under zero1"),
        ("run/test_any_function.py", "run", "values beside a loss"),
        ("run/test_backward.py", "run strategies", "losses of the loop under more strategies"),
        ("run/test_coupled_samples.py", "trial run", "losses of several samples"),
        ("run/test_ema.py", "run strategies/zero", "moving averages on four ranks"),
        ("run/test_edits_and_graphs.py", "run strategies/ddp", "edits of a gradient under ddp"),
        ("run/test_first_failure.py", "run comm", "the first error of many ranks"),
        ("run/test_host_synchronisation.py", "run", "steps that never wait for the device"),
        ("run/test_local_shard_step.py", "run strategies/zero", "all optimizers on shards"),
        ("run/test_loop_watch.py", "run", "loops that mix rows"),
        ("run/test_loss_scaling.py", "run strategies/zero", "overflows under zero1 and zero2"),
        ("run/test_models_of_loops.py", "run trial", "models that mix samples, under zero3"),
        ("run/test_nonfinite_steps.py", "run", "NaN in each place under each strategy"),
        ("run/test_predict.py", "run strategies/zero", "predictions under zero1 in a pipeline"),
        ("run/test_replica_check.py", "run", "bits that flip on one rank"),
        (
            "run/test_run_checkpoints.py",
            "run checkpoint",
            "scripts that resume under more strategies",
        ),
        ("run/test_stopped_group.py", "run data", "workers of a map-style loader under SIGTERM"),
        ("run/test_thawed_layers.py", "run strategies", "layers thawed under each strategy"),
        ("run/test_this_rank.py", "run strategies", "clipping by the largest gradient"),
        ("run/test_wrapping_optimizers.py", "run", "optimizers around optimizers"),
        ("scripts/test_checks_leave_nothing.py", "run trial", "scripts with and without checks"),
        ("scripts/test_scripts.py", "run strategies trial", "scripts on two ranks", "scripts"),
        ("scripts/test_transformers.py", "run strategies", "models of transformers, from scripts"),
        ("security/test_hostile_files.py", "config", "64 KiB of hostile YAML"),
        ("security/test_listening_ports.py", "launch parameter_server", "who listens, and where"),
        ("security/test_server_key_stays_secret.py", "parameter_server", "where the key may stand"),
        ("shm_backend/test_backend.py", "shm_backend", "an import of shoal before torch"),
        ("shm_backend/test_backend_faults.py", "shm_backend", "a rank that dies", COLLECTIVES),
        ("shm_backend/test_messages_faults.py", "shm_backend", "senders that die"),
        ("shm_backend/test_native.py", "shm_backend", "compiled all-reduces", COLLECTIVES),
        ("shm_backend/test_phase_board.py", "shm_backend", "calls of all kinds in a row"),
        ("shm_backend/test_torch_distributed_tests.py", "shm_backend", "torch's own tests"),
        (
            "slurm/test_real_slurm.py",
            "launch",
            "jobs on a Slurm of four nodes",
            REAL,
        ),
        ("strategies/ddp/test_compression.py", "comm/compression", "PowerSGD of full rank"),
        (
            "strategies/ddp/test_named_algorithms.py",
            "strategies/ddp comm",
            "training by a named algorithm",
        ),
        ("strategies/ddp/test_own_buckets.py", "strategies/ddp", "an LSTM in our buckets"),
        ("strategies/pipeline/test_compiled_and_kept.py", "strategies/pipeline", "compiled stages"),
        ("strategies/pipeline/test_layer_drop.py", "strategies/pipeline", "layers that drop out"),
        ("strategies/pipeline/test_pipeline.py", "strategies/pipeline", "schedules on four ranks"),
        ("strategies/pipeline/test_rows_that_call_blocks.py", "strategies/pipeline", "rows"),
        ("strategies/pipeline/test_three_axes.py", "strategies", "zero-bubble in slices"),
        (
            *("strategies/pipeline/test_values_by_other_ways.py", "strategies/pipeline"),
            "values that hooks keep",
        ),
        ("strategies/server/test_server.py", "parameter_server", "staleness and accumulation"),
        ("strategies/server/test_server_any_step.py", "parameter_server", "steps left out"),
        ("strategies/server/test_server_elastic.py", "parameter_server", "servers added", FAULTS),
        ("strategies/server/test_server_faults.py", "parameter_server", "servers killed", FAULTS),
        (
            *("strategies/server/test_server_hostile_clients.py", "parameter_server/transport"),
            *("strangers at a server's port", FAULTS),
        ),
        ("strategies/server/test_server_network.py", "parameter_server", "lost links", FAULTS),
        ("strategies/server/test_server_sparse.py", "parameter_server", "sparse gradients"),
        ("strategies/server/test_server_workers.py", "parameter_server", "dead workers", FAULTS),
        (
            "strategies/tensor/test_losses_on_slices.py",
            "strategies/tensor",
            "several models in slices",
        ),
        ("strategies/tensor/test_script_shaped_models.py", "strategies/tensor", "plans that end"),
        ("strategies/tensor/test_sequence_parallel.py", "strategies/tensor", "sequence slices"),
        ("strategies/tensor/test_tensor_plan.py", "strategies/tensor", "plans on four ranks"),
        ("strategies/tensor/test_tensor_runs.py", "strategies/tensor", "jobs on four ranks"),
        ("strategies/tensor/test_tensor_user_plan.py", "strategies/tensor", "plans of users"),
        ("strategies/test_conformance.py", "strategies comm", "every cell of docs/verified.md"),
        ("strategies/test_contract.py", "strategies", "strategies of other packages"),
        ("strategies/test_freed_parameters.py", "strategies", "freed under tensor and zero"),
        ("strategies/test_hooks_of_scripts.py", "strategies run/guards", "hooks on parameters"),
        ("strategies/test_local_sgd.py", "strategies", "verify of local steps"),
        (
            *("strategies/transforms/test_activation_checkpointing.py", "strategies/transforms"),
            "recompute of shared layers",
        ),
        ("strategies/transforms/test_compile.py", "strategies/transforms", "torch.compile"),
        ("strategies/zero/test_gathered_dtype.py", "strategies/zero", "gathered bf16 under zero1"),
        (
            *("strategies/zero/test_gradients_set_to_none.py", "strategies/zero"),
            "gradients set to None under zero1 and zero2",
        ),
        ("strategies/zero/test_lockstep.py", "strategies/zero", "ranks that use other blocks"),
        ("strategies/zero/test_zero.py", "strategies/zero", "more of zero2 and shared modules"),
        ("strategies/test_any_step.py", "strategies/zero", "steps of any shape"),
        ("strategies/zero/test_zero_optimizers.py", "strategies/zero", "optimizers on shards"),
        ("trace/test_trace_command.py", "trace", "runs that end before their trace"),
        ("trace/test_traced_runs.py", "trace strategies/zero", "traces of zero"),
        ("train/test_async_replay.py", "train parameter_server", "asynchronous runs done again"),
        ("train/test_builtin_jobs.py", "train config models", "the built-in jobs"),
        ("train/test_draws_setting.py", "train data", "dropout of one device"),
        ("train/test_exact_evaluation.py", "run train", "reports on images"),
        ("train/test_export.py", "train", "memory of an export under ddp"),
        ("train/test_interrupted.py", "train", "one process that Ctrl-C ends before it saves"),
        ("train/test_kill.py", "train", "kills at each moment of a run"),
        ("train/test_recipe.py", "train", "recipes on three ranks"),
        ("train/test_replica_job.py", "train run", "two replicas of which one is wrong"),
        ("train/test_restarts.py", "launch train", "restarts after lost ranks"),
        ("train/test_resume.py", "train", "every layout to every other"),
        ("train/test_resume_compressed.py", "train comm/compression", "error feedback kept"),
        ("train/test_run_again.py", "train", "a finished run, again"),
        ("train/test_scale.py", "train launch", "worlds that change under ddp and zero1"),
        ("train/test_resume_with_another_strategy.py", "train", "another strategy"),
        ("train/test_fast_save_restarts.py", "train", "saves in a fast directory"),
        ("train/test_save_interval.py", "train", "a chosen interval beside zero3"),
        (
            "train/test_spoiled_checkpoints.py",
            "train checkpoint",
            "full disks and the best checkpoint",
        ),
        ("train/test_stop.py", "train launch", "signals at each moment"),
        ("trial/test_trial_ranks.py", "trial", "trials under mixed strategies"),
        ("verification/test_check_strategy.py", "verification", "strategies of other packages"),
        ("verification/test_foreign_scripts.py", "verification", "scripts of other libraries"),
        ("verification/test_script_verification.py", "verification", "scripts, whole"),
        ("watchdog/test_hang_detector.py", "watchdog", "100,000 schedules of ranks"),
        ("weights/test_empty_weights.py", "weights strategies", "empty weights in 3D"),
    )
)
