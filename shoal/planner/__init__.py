"""The planner: which strategy, will it fit, how long does a step take.

trace_model.py      count a model's work once, on tensors without memory
calibration.py      measure a machine
strategy_search.py  cost of every strategy line that fits the model and the ranks
plan_report.py      the plans as a table
server_count.py     how many parameter servers
goodput.py          failures: when to save, and what is lost
"""
