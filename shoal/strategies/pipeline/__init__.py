"""Pipeline parallelism in pieces: which rank computes what when, where a model is cut, what crosses
the cuts.

`strategies/pipeline.py` puts them together. One file each: `schedules` makes tables of actions,
`timing` says when each action runs and how long ranks wait, `draw` shows it; `trace`, `steps`,
`balance`, `plan` and `stage` cut a model; `wire` carries tensors between ranks, `engine` runs a
table."""
