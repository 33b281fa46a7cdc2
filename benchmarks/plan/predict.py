"""Predicts every case from machine.json, into predictions.json. Run it, and commit the file, before
`measure.py`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.plan.cases import (
    CASES,
    MODELS,
    ON_ONE_HOST,
    PlannedCase,
    loss,
    make_optimizer,
    model_of,
    samples_of,
)
from benchmarks.report_page import write_result
from shoal.costs.cluster import one_host
from shoal.costs.machine import Machine, load
from shoal.costs.memory_peak import rank_peak
from shoal.errors import ShoalError
from shoal.planner.calibration import planned_step
from shoal.planner.operation_speeds import REFERENCE
from shoal.planner.strategy_search import Planner, Workload
from shoal.planner.trace_model import trace_model

HERE = Path(__file__).parent
MACHINE, PREDICTIONS = HERE / "machine.json", HERE / "predictions.json"


def main() -> None:
    machine = load(MACHINE)
    workloads = {name: workload_of(name) for name in ON_ONE_HOST}
    predictions = []
    for case in CASES:
        entry = {**case._asdict(), **_predicted(case, workloads[case.model], machine)}
        print(entry, flush=True)
        predictions.append(entry)
    write_result(PREDICTIONS, predictions)
    write_result(MACHINE, json.loads(MACHINE.read_text()))  # a line for each of its entries


def workload_of(name: str) -> Workload:
    """Return the work of a model of `MODELS`."""
    case = PlannedCase(name, "single", 1)
    model = model_of(case)
    batch = samples_of(case, 1)[0:1]
    work = trace_model(model, lambda x, y: loss(model(x), y), make_optimizer, batch, name)
    return Workload(work, model, MODELS[name].batch)


def _predicted(case: PlannedCase, workload: Workload, machine: Machine) -> dict[str, Any]:
    workload = Workload(workload.model, workload.module, workload.global_batch, case.accumulate)
    planner = Planner(workload, machine, one_host(case.ranks, 2.0**50))
    try:
        plan = planner.plan(case.strategy)
    except ShoalError as error:
        return {"refused": str(error)}
    assert plan.time is not None
    step = plan.step
    alone = replace(machine.compute_of(case.ranks), step_s=0.0)  # a step of torch
    held = max((rank_peak(step, rank) for rank in range(len(step.rows))), key=lambda h: h.total)
    return {
        "step_s": plan.seconds,
        "latest_s": plan.latest_s,
        "on_path_s": dict(plan.time.on_path),
        "idle": plan.time.idle,
        "reference_s": planned_step(machine, 1, "single", REFERENCE)(alone),
        "peak_bytes": held.total - step.model.buffer_bytes,  # measure.py does not count them
        "parameters": held.parameters,
        "optimizer": held.optimizer,
    }


if __name__ == "__main__":
    main()
