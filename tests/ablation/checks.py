"""Every check of a run, with its files, what it is for, and how an ablation switches it off."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

WITHOUT = "SHOAL_TEST_WITHOUT"
"""The variable that names the check which the ranks of a test switch off."""

GUARDS, TRIAL, RUN = "shoal.run.guards", "shoal.trial", "shoal.run"


class Check(NamedTuple):
    """A check of a run.

    Attributes:
        files: modules that only this check needs.
        decides: what it finds or mends.
        off: replaces it by nothing in this process.
        planted_in: the file of tests, below tests/, that plants what it looks for.
        scripts: names of those that make the calls that it looks at; empty for all scripts.
    """

    files: tuple[str, ...]
    decides: str
    off: Callable[[], None]
    planted_in: str
    scripts: str = ""


def replaced(path: str, value: Any) -> Callable[[], None]:
    """Return a function that sets an attribute: `module:name` or `module:Class.name`."""

    def replace() -> None:
        module, _, names = path.partition(":")
        holder: Any = import_module(module)
        *parents, name = names.split(".")
        for parent in parents:
            holder = getattr(holder, parent)
        assert hasattr(holder, name), path
        setattr(holder, name, value)

    return replace


def without_guard(name: str) -> Callable[[], None]:
    """Return a function that leaves out a guard that yields handles."""
    return replaced(f"{GUARDS}.guards:{name}", lambda *_: ())


def all_of(*each: Callable[[], None]) -> Callable[[], None]:
    def switch_all_off() -> None:
        for off in each:
            off()

    return switch_all_off


class _NoWatch:
    """Stands in for a guard that is told of steps."""

    def __init__(self, *_: Any) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_: None


@contextmanager
def _no_notes(*_: Any) -> Iterator[None]:
    yield


def _nothing(*_: Any, **__: Any) -> None:
    return None


CHECKS = {
    "trial of the loss": Check(
        (TRIAL, f"{RUN}.step_trials"),
        "a loss that is no mean over samples",
        replaced(f"{RUN}.step_trials:StepTrials.first_step", _nothing),
        planted_in="trial/test_losses.py",
    ),
    "trial of later batches": Check(
        (),
        "a loss that is no mean over samples once padding comes",
        replaced(f"{RUN}.step_trials:StepTrials.later_step", _nothing),
        planted_in="trial/test_trial_ranks.py",
        scripts="LatePadding",
    ),
    "values of own samples": Check(
        (),
        "what a loss keeps of a rank's samples, or reads of what the loop has kept",
        all_of(
            replaced(f"{TRIAL}.judge_loss:LossJudge.memory", lambda *_: 0.0),
            replaced(f"{RUN}.step_trials:StepTrials._numbers_of_ranks", lambda *_: {}),
            replaced(f"{TRIAL}.replaced_rows:MOST_TABLES", 0),
        ),
        planted_in="trial/test_trial_ranks.py",
        scripts="BaselineInTheLoss BalanceOfOwnLosses BankInTheLoop",
    ),
    "models of loops": Check(
        (f"{TRIAL}.called_models",),
        "a model that mixes samples, of whose outputs the loop takes a mean",
        replaced(f"{RUN}.step_trials:StepTrials.called_models", _nothing),
        planted_in="run/test_models_of_loops.py",
        scripts="NormOfTheBatchInTheLoop",
    ),
    "graph of the loss": Check(
        (f"{TRIAL}.loss_graph", f"{TRIAL}.loss_divisors"),
        "a loss of the loop that is no mean over samples",
        replaced(f"{TRIAL}.loss_graph:LossGraphCheck.compare", _nothing),
        planted_in="run/test_losses_of_loops.py",
        scripts="LatePaddingInTheLoop SpreadInTheLoop",
    ),
    "trial in float64": Check(
        (f"{TRIAL}.float64_functions",),
        "rounding that looks like coupling",
        replaced(f"{TRIAL}.judge_loss:_judged_in_float64", _nothing),
        planted_in="trial/test_rounding.py",
    ),
    "watch of the loop": Check(
        (f"{RUN}.loop_watch", f"{TRIAL}.replaced_rows", f"{TRIAL}.mixed_rows"),
        "samples that the loop computes from other samples of a rank",
        replaced(f"{RUN}.loop_watch:LoopWatch._is_due", False),
        planted_in="run/test_loop_watch.py",
    ),
    "note on draws in the loop": Check(
        (),
        "random numbers of the loop",
        all_of(
            replaced(f"{RUN}.loop_watch:DRAWN", ""),
            replaced(f"{RUN}.loop_watch:HOST_DRAWN", ""),
        ),
        planted_in="run/test_loop_watch.py",
    ),
    "notes of the first step": Check(
        (f"{RUN}.first_step_notes",),
        "random numbers and buffers of layers",
        replaced(f"{RUN}.step_checks:noting_first_step", _no_notes),
        planted_in="run/test_buffer_notes.py",
    ),
    "given weights": Check(
        (),
        "load_state_dict of full weights on shards",
        without_guard("cut_given_weights"),
        planted_in="run/guards/test_loaded_values.py",
    ),
    "state requests": Check(
        (f"{GUARDS}.full_state",),
        "state_dict() of a part",
        without_guard("guard_state_requests"),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="ResumedInPlace BestWeights AverageOfWholeWeights",
    ),
    "refused calls": Check(
        (f"{GUARDS}.refused_calls",),
        "functional_call, torch.save(model) and torch's GradScaler",
        without_guard("guard_refused_calls"),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="MetaLearning SavedModule ScaledGradients",
    ),
    "clipping": Check(
        (f"{GUARDS}.grad_clipping",),
        "torch's clipping of gradients",
        without_guard("guard_clipping"),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="ClippingByTorch NanoGpt StepsByHand",
    ),
    "functions of shards": Check(
        (f"{GUARDS}.shard_functions",),
        "arithmetic of shards and whole tensors, norms of parts, draws like a shard",
        without_guard("guard_shards"),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="ConflictingTasks WeightAverage MomentumContrast Pruning SharpnessAware "
        "DiffusionAverage NoisyWeights RedrawnHead LayerwiseRates NormOfGroups LoggedMoments",
    ),
    "absent weights": Check(
        (f"{GUARDS}.absent_values",),
        "weights of other stages",
        without_guard("guard_absent_weights"),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="WeightAverage NoisyWeights Pruning RedrawnHead MomentumContrast",
    ),
    "backward passes": Check(
        (f"{GUARDS}.backward_hooks",),
        "loss.backward() outside of a step",
        without_guard("guard_backward"),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="BackwardByHand AccumulationByHand",
    ),
    "agreement of ranks": Check(
        (),
        "learning rates, batches, loaded values and weights that differ between ranks",
        without_guard("guard_agreement"),
        planted_in="run/guards/test_loaded_values.py",
        scripts="LoadedByRankZero RedrawnHead ForgottenShare",
    ),
    "equal weights": Check(
        (),
        "weights that a script writes on one rank",
        all_of(
            replaced(f"{GUARDS}.rank_agreement:check_equal_weights", _nothing),
            replaced(f"{GUARDS}.guards:check_equal_weights", _nothing),
        ),
        planted_in="run/guards/test_equal_weights.py",
        scripts="CopiedByRankZero RedrawnHead LoadedByRankZero",
    ),
    "absent gradients": Check(
        (),
        "gradients that are elsewhere",
        replaced(
            f"{GUARDS}.guards:AbsentGradients",
            type(
                "Off",
                (_NoWatch,),
                {
                    "hide_from_update": lambda *_: (),
                    "show_after_update": lambda *_: (),
                },
            ),
        ),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="StepsByHand ConflictingTasks LayerwiseRates ClippingByTorch NormOfGroups",
    ),
    "written weights": Check(
        (f"{GUARDS}.weight_writes",),
        "weights written under servers",
        replaced(f"{GUARDS}.guards:WeightWatch", _NoWatch),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="NoisyWeights WeightAverage Pruning RedrawnHead",
    ),
    "weights written by a pass": Check(
        (f"{GUARDS}.forward_writes",),
        "weights that a forward pass writes into gathered shards",
        replaced(f"{GUARDS}.guards:ForwardWrites", _NoWatch),
        planted_in="run/guards/test_forward_writes.py",
        scripts="WeightsOfUnitLength",
    ),
    "optimizer state": Check(
        (f"{GUARDS}.optimizer_state",),
        "optimizer.state where others hold it",
        replaced(f"{GUARDS}.guards:OptimizerStates", _NoWatch),
        planted_in="run/guards/test_bypasses_under_strategies.py",
        scripts="ForgottenMoments ReplacedMoments LoggedMoments ResumedInPlace CopiedOptimizer",
    ),
}


def switch_off(name: str) -> None:
    """Switch checks off in this process: a name, several with + between them, or none for ""."""
    for each in filter(None, name.split("+")):
        CHECKS[each].off()
