import shoal


def test_the_public_names_are_these_and_only_these() -> None:
    names = [
        "Checkpoints",
        "Run",
        "ShoalError",
        "Verdict",
        "allgather",
        "allreduce",
        "barrier",
        "broadcast",
        "counted",
        "init",
        "summed",
    ]
    assert sorted(shoal.__all__) == [*names, "verify", "verify_script"]
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)


def test_the_public_methods_of_a_run_are_these_and_only_these() -> None:
    public = [name for name in dir(shoal.Run) if not name.startswith("_")]
    names = [
        "backward",
        "check_replicas",
        "clip_gradients",
        "edit",
        "end_trace",
        "evaluate",
        "finite",
        "forward_backward",
        "gather",
        "gradients",
        "is_synchronous",
        "layout_of",
        "load_state",
        "microbatches",
        "outside_step",
        "parameters",
        "prepare",
        "remote",
        "report",
        "request_stop",
        "rows",
        "save",
        "share",
        "state",
        "step",
        "stopping",
        "synchronize",
        "to_device",
        "wait",
        "weights",
    ]
    assert sorted(public) == names
