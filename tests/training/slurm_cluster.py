"""Runs Slurm's daemons on two simulated nodes: one controller and two slurmd.

The daemons are Debian's packages.
"""

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.training.two_nodes import TwoNodes, environment, skip_without

START_TIMEOUT_S = 60.0
CONFIGURATION = """
ClusterName=two
SlurmctldHost=node1
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=5
NodeName=node[1-2] CPUs={cores}
PartitionName=all Nodes=ALL Default=YES MaxTime=60
"""
DAEMONS = ("munged", "slurmctld", "slurmd")


@dataclass(frozen=True)
class Slurm:
    """A running Slurm cluster."""

    nodes: TwoNodes
    configuration: Path

    def ask(self, *command: str, folder: Path = Path()) -> str:
        """Run a command of Slurm on the first node, and return its output."""
        done = self.nodes.run("node1", [*command], folder, **self.variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """Return the state of a job, such as PENDING, RUNNING or COMPLETED."""
        answer = self.ask("scontrol", "--oneliner", "show", "job", job)
        return next(word for word in answer.split() if word.startswith("JobState=")).removeprefix(
            "JobState="
        )

    @property
    def variables(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.configuration)}


@contextlib.contextmanager
def slurm(nodes: TwoNodes) -> Iterator[Slurm]:
    """Run Slurm's daemons while the block runs; skip the test if they are not installed."""
    skip_without("srun", *DAEMONS)
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir=nodes.folder))  # one for each cluster
    for name in ("state", "node1", "node2"):
        (folder / name).mkdir()
    configuration = folder / "slurm.conf"
    configuration.write_text(
        CONFIGURATION.format(folder=folder, cores=len(os.sched_getaffinity(0)) // 2)
    )
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o400)
    cluster = Slurm(nodes, configuration)
    files = {
        "socket": "munge.socket",
        "key-file": "key",
        "log-file": "munge.log",
        "pid-file": "munge.pid",
        "seed-file": "munge.seed",
    }
    munged = [
        "/usr/sbin/munged",
        "--foreground",
        "--force",
        *(f"--{option}={folder / name}" for option, name in files.items()),
    ]
    with contextlib.ExitStack() as stack:
        daemons = {"munged": munged, "slurmctld": ["/usr/sbin/slurmctld", "-D", "-c"]}
        for name, command in daemons.items():
            (folder / name).mkdir()
            stack.enter_context(nodes.started("node1", command, folder / name, **cluster.variables))
        for node in ("node1", "node2"):
            stack.enter_context(
                nodes.started(
                    node, ["/usr/sbin/slurmd", "-D", "-N", node], folder / node, **cluster.variables
                )
            )
        wait_until(lambda: _idle_nodes(cluster) == 2, "two idle nodes", START_TIMEOUT_S)
        yield cluster


def wait_until(happened: Callable[[], bool], what: str, timeout_s: float) -> None:
    """Poll `happened` every half second; fail after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < deadline, f"no {what} after {timeout_s} s"
        time.sleep(0.5)


def _idle_nodes(cluster: Slurm) -> int:
    command = cluster.nodes.command(
        "node1", ["sinfo", "--noheader", "--states=idle", "--format=%D"]
    )
    answer = subprocess.run(
        command, env=environment(**cluster.variables), capture_output=True, text=True
    ).stdout.strip()
    return int(answer or 0)
