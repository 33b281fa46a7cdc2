"""Tensor parallelism: `tensor=T` divides layers over the T ranks of a tensor group.

`strategy.py` first decides, then executes; nothing is divided before the plan is complete.

Decide   `plan.py` makes the plan. It asks `find_attention.py` and `find_pairs.py`,
         which searches the traced forward passes of `graph.py`.
         `candidates.py` knows the layers that may be divided, and the reasons against others.
Execute  `apply.py` replaces classes and parameters by those of `parallel_layers.py`,
         `heads.py` and `vocabulary.py`. `region.py` is their way in and out;
         `dropout_rng.py` draws as one device does, and `sliced_parameters.py` refuses parameters
         in slices that code of the user takes.
Tensors  `lazy_gather.py` becomes full when needed: logits of `vocabulary.py`, and `sequence.py`,
         which is divided along the tokens.
"""
