"""`--slurm`: one batch script and its submission.

The ranks of the job are tasks of `srun`, which `slurm.variables` reads.
"""
