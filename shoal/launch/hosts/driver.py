"""Commands that start ranks on several hosts: connect, check, start, and see to their end.

this process ─┬─ ssh ── agent of host 0 ── ranks 0, 1
              ├─ ssh ── agent of host 1 ── ranks 2, 3
              └─ ...
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

from shoal.launch.control_channel import ControlServer
from shoal.launch.hosts.host_connections import HostConnections
from shoal.launch.hosts.hosts_job import HostsJob
from shoal.launch.hosts.line_printer import LinePrinter
from shoal.launch.hosts.rank_logs import RankLogs
from shoal.launch.hosts.remote_work import HostsOptions, RemoteWork
from shoal.launch.job_secret import new_secret
from shoal.launch.local import supervised
from shoal.launch.output import Output
from shoal.launch.rank import EXIT_INTERRUPTED
from shoal.launch.restarting import run_with_restarts
from shoal.launch.supervise import caught


def run_on_hosts(options: HostsOptions, work: RemoteWork, grace_s: float = 60.0) -> int:
    """Run `work` once on all hosts, and wait for its end. Main thread only.

    Returns:
        The exit code, as `shoal.launch.local.run`.

    Raises:
        LaunchError: the hosts cannot be used; the message has all their problems.
        UsageError: an option, the ssh client or the name of a host cannot be used.
    """
    try:
        with (
            _connected(options, work) as job,
            caught() as signals,
            job.start(options.processes) as ranks,
        ):
            return supervised(ranks, signals, grace_s)
    except KeyboardInterrupt:  # before signals are caught
        return EXIT_INTERRUPTED


def run_on_hosts_with_restarts(
    options: HostsOptions, work: RemoteWork, control: ControlServer, restarts: int
) -> int:
    """Run `work` on all hosts to its end, again from where it was saved after a loss.

    Returns, raises: as `run_on_hosts`.
    """
    try:
        with _connected(options, work) as job:
            return run_with_restarts(job, options.processes, control, restarts)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


@contextmanager
def _connected(options: HostsOptions, work: RemoteWork) -> Iterator[HostsJob]:
    # A log has all that ranks print, also what the user does not see.
    sent: Output = work.output if options.log_directory is None else "all"
    secret = new_secret()
    specification = replace(work, output=sent).specification(options.variables, secret)
    logs = None if options.log_directory is None else RankLogs(options.log_directory)
    printer = LinePrinter(work.output, logs)
    with (
        closing(logs) if logs is not None else nullcontext(),
        HostConnections(options.hosts, options.python, specification, printer) as connections,
    ):
        job = HostsJob(connections, options, work, secret)
        job.connect()
        yield job
