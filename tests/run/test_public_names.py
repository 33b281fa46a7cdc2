import pytest

import shoal


def test_the_public_names_are_these_and_only_these() -> None:
    names = [
        *("Checkpoints", "Collate", "Run", "ShoalError", "Source", "Strategy", "Verdict"),
        *("all_gather", "all_reduce", "allgather", "allreduce", "barrier", "broadcast", "counted"),
        *("empty_weights", "init", "load_weights", "plan", "summed"),
    ]
    assert sorted(shoal.__all__) == [*names, "verify", "verify_script"]
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)


def test_the_public_methods_of_a_run_are_these_and_only_these() -> None:
    public = [name for name in dir(shoal.Run) if not name.startswith("_")]
    names = [
        *("backward", "call", "check_replicas", "checkpoint", "clip_grad_norm_", "clip_gradients"),
        *("device", "edit", "ema", "end_trace", "evaluate", "finite", "forward_backward"),
        *("gather", "gradients", "is_synchronous", "layout_of", "load_state", "load_state_dict"),
        *("local_rank", "log", "log_to", "main_first", "microbatches", "outside_step"),
        *("parameters", "predict", "prepare", "print", "progress", "rank", "remote", "report"),
        *("request_stop", "rows", "save", "save_pretrained", "share", "state", "state_dict"),
        *("step", "stopping", "synchronize", "to_device", "wait", "weights", "world_size"),
    ]
    assert sorted(public) == names


def test_optimizers_are_reached_from_the_top() -> None:
    assert shoal.optim.__all__ == ["AdamW8bit"]
    with pytest.raises(AttributeError, match="no attribute 'Adam8bit'"):
        _ = shoal.optim.Adam8bit
