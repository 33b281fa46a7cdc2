"""Layers that are cut along the tensor axis, and the plan that says which: what `tensor=T` is made
of.

`region.py` where cut layers may run; `linear.py`, `transposed.py`, `channels.py`, `heads.py`,
`vocabulary.py` the layers; `graph.py` looks at forward passes, `pairs.py` finds in them what can be
cut, `plan.py` puts it together and `apply.py` does it. `sequence.py` is the stream between them in
slices, `entered.py` its way in and out."""
