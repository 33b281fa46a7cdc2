"""`--slurm`: one batch script, its submission, its log, its end.

The ranks of the job are tasks of `srun`, which `slurm.variables` reads.
"""
