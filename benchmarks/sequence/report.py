"""Turns result.json into the table of README.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.report_page import fill, table, told

HERE = Path(__file__).parent
FORMULA = {"whole": 4, "slices": 5}
"""Sums of the stream in a block and step; of those in slices, one in five is half sums that
gather it again.
"""


def main() -> None:
    result = json.loads((HERE / "result.json").read_text())
    stream, rows = result["stream_bytes"], []
    for degree, block in result["blocks"].items():
        ranks = int(degree)
        kept = [block[how]["kept_bytes"] for how in ("whole", "slices")]
        sent = [block[how]["sent_bytes"] for how in ("whole", "slices")]
        expected = [FORMULA[how] * 2 * (ranks - 1) / ranks * stream for how in ("whole", "slices")]
        rows.append(
            [
                f"T = {degree}",
                *(f"{value / stream:.2f} b s h" for value in kept),
                f"**{kept[1] / kept[0]:.3f}**",
                *(
                    f"{a / stream:.3f} b s h ({a / b:.4f})"
                    for a, b in zip(sent, expected, strict=True)
                ),
            ]
        )
    head = ["", "kept, stream whole", "kept, in slices", "ratio", "sent, stream whole (of 4 sums)"]
    text = "\n\n".join(
        [table([*head, "sent, in slices (of 5 sums)"], rows), told(result["circumstances"])]
    )
    fill(HERE / "README.md", text)
    print(text)


if __name__ == "__main__":
    main()
