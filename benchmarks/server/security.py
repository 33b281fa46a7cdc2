"""Measures what the connections of servers cost, by network, and writes the table of
docs/security.md.

    python -m benchmarks.server.security

All candidates take turns as in `measure.py`, so the ratios within a round are believed.
"""

from __future__ import annotations

import argparse
import ssl
from pathlib import Path
from statistics import median, quantiles

import torch
from torch import multiprocessing

from benchmarks.report_page import circumstances, fill, table, told
from benchmarks.server.measure import MIB, measure, start

PAGE = Path(__file__).parents[2] / "docs/security.md"
UNIX, TLS, PLAIN = "Shoal over a Unix socket", "Shoal over TLS", "Shoal over TCP"
ROWS = {UNIX: "one machine: Unix socket", TLS: "TLS 1.3", PLAIN: "`encrypt=false`: plain TCP"}
WORKERS, SERVERS, SIZES_MIB = 2, 1, (4, 64)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=30, help="of one size")
    options = parser.parse_args()
    torch.set_num_threads(1)
    multiprocessing.set_forkserver_preload(["torch"])
    facts = circumstances(["torch", "cryptography"])
    facts["versions"] += f", {ssl.OPENSSL_VERSION}"
    running = start(list(ROWS), WORKERS, SERVERS, {})
    cells: dict[str, list[str]] = {name: [] for name in ROWS}
    for mib in SIZES_MIB:
        times_s = measure(running, WORKERS, mib, options.seconds)
        for name, turns in times_s.items():
            low, middle, high = quantiles([2 * WORKERS * mib * MIB / s / 1e9 for s in turns], n=4)
            share = median(plain / s for plain, s in zip(times_s[PLAIN], turns, strict=True))
            cells[name] += [f"{middle:.2f} ({low:.2f} to {high:.2f})", f"{share:.2f}"]
    for candidate in running.values():
        candidate.close()
    head = [f"{WORKERS} workers, {SERVERS} server, over loopback"]
    head += [word for mib in SIZES_MIB for word in (f"{mib} MiB: GB/s (quartiles)", "of plain TCP")]
    rows = [[text, *cells[name]] for name, text in ROWS.items()]
    fill(PAGE, f"{table(head, rows)}\n\n{told(facts)}")


if __name__ == "__main__":
    main()
