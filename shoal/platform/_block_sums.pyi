from typing import Any

VERSION: int

def block_sums(block: Any, low_factors: Any, high_factors: Any, /) -> tuple[int, int]: ...
