"""The planner: which strategy, will it fit, how long does a step take.

trace_model.py      count a model's work once, on tensors without memory
job_workload.py     of an experiment; library.py of a model; script_workload.py of a user's script
calibration.py      measure a machine
strategy_search.py  cost of every strategy line that fits the model and the ranks
plan_report.py      the plans as a table, how many parameter servers, how often to save
smallest_change.py  what makes a workload fit, as commands
"""
