"""The cost of a training step: pure descriptions and arithmetic, without torch.

      work.py             the operations, activations and parameters of a model
      machine.py          measured speeds of a machine
      cluster.py          hosts, their memory and their links
      step_cost.py        what a rank holds, computes and sends in a step; strategies transform it
      pass_table.py       the passes through the stages of a pipeline, in order
      memory_peak.py      the most that a rank holds at once
      event_simulator.py  the time of tasks that wait for each other and share links

Every strategy has a method `cost` beside its `apply`, from `StepCost` to `StepCost`.
`shoal.planner` calls them; it has no list of strategies.
"""
