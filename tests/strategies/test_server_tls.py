"""Training whose connections to the servers are encrypted."""

import shutil
import subprocess
from pathlib import Path

import pytest
from disturbed import check, trained

from shoal.errors import LaunchError
from shoal.server.tls import MAKE_ONE
from shoal.testing import world


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_training_over_encrypted_connections_ends_at_the_same_bits(tmp_path: Path) -> None:
    subprocess.run(MAKE_ONE, shell=True, cwd=tmp_path, check=True, capture_output=True)
    line = "server=2,replicas=2,part_mb=0.04,shared_memory=false"
    plain = world.run(2, trained, line)[0][0]
    check(world.run(2, trained, f"{line},tls={tmp_path / 'job.pem'}"), plain)


def test_a_certificate_that_is_not_there_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="Make one: openssl req"):
        world.run(2, trained, f"server=1,tls={tmp_path / 'none.pem'}")
