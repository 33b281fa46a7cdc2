"""Pipeline parallelism: the way from a model to a step.

`strategy.py` goes through these files in order:

1. Observe: `units.py` finds the modules that are called whole, `observed_units.py` runs the user's
   function on a sample with them, and measures each call.
2. Partition: `plan.py` chooses the cuts.
3. Walk: `walk.py` runs the function for one stage, and finds before what crosses each cut. Other
   stages' values are absent: `absent.py`, `meta_call.py`. `division.py` puts these together.
4. Schedule: `schedules.py` makes the table of actions, and checks it.
5. Execute: `executor.py` makes micro-batches, `engine.py` takes this rank's row of the table.
6. Send: `p2p.py` says which message follows from which action, and sends it.
7. Finish: `executor.py` sums tied gradients, and tells all ranks what the last stage has.

`schedule_timing.py` shows a table without running it.
"""
