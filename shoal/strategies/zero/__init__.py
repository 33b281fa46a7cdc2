"""ZeRO 1, 2 and 3 by `fully_shard`: see `strategy.py`."""
