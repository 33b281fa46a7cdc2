"""`python -m shoal` is `shoal`; `torchrun -m shoal train digits` needs it."""

from shoal.cli import main

main()
