"""Pipeline parallelism: the way from a model to a step.

`strategy.py` goes through these files in order:

1. Trace: `fx_trace.py` makes a graph of the model, `trace_check.py` compares it with the model.
2. Measure: `steps.py` lists the steps of the graph, their times, and the values live between them.
3. Partition: `plan.py` chooses the cuts by `balance.py`; `stage.py` makes a function of each stage.
4. Schedule: `schedules.py` makes the table of actions, `schedule_table.py` checks it.
5. Execute: `executor.py` makes micro-batches, `engine.py` takes this rank's row of the table.
6. Send: `stage_messages.py` says which message follows from which action, `p2p.py` sends it.
7. Finish: `ties.py` sums tied gradients, `deferred_batchnorm.py` updates statistics.

`schedule_timing.py` and `draw.py` show a table without running it.
"""
