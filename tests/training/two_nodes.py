"""Simulates two nodes on one machine, by network namespaces that a virtual cable connects.

Each node has its own host name and address, and half of the cores. The nodes share the file system,
as in a cluster. Real launchers run on them over real sockets. Only root can create them.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = {"node1": "10.77.0.1", "node2": "10.77.0.2"}
TIMEOUT_S = 400.0


@dataclass(frozen=True)
class TwoNodes:
    """The nodes `node1` and `node2`; `folder` holds the files of their daemons."""

    folder: Path
    namespaces: dict[str, str]

    def command(self, node: str, command: list[str]) -> list[str]:
        """Return `command`, wrapped so that it runs on `node`."""
        cores = sorted(os.sched_getaffinity(0))
        half = cores[: len(cores) // 2] if node == "node1" else cores[len(cores) // 2 :]
        hosts = shlex.quote(str(self.folder / "hosts"))
        enter = f'mount --bind {hosts} /etc/hosts && hostname {node} && exec "$@"'
        namespace = f"/run/netns/{self.namespaces[node]}"
        inside = [
            "nsenter",
            f"--net={namespace}",
            "unshare",
            "--uts",
            "--mount",
            "sh",
            "-c",
            enter,
            node,
        ]
        return ["taskset", "--cpu-list", ",".join(map(str, half)), *inside, *command]

    def run(
        self, node: str, command: list[str], folder: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on `node` to its end, in `folder`."""
        return subprocess.run(
            self.command(node, command),
            cwd=folder,
            env=environment(**variables),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    @contextlib.contextmanager
    def started(
        self, node: str, command: list[str], folder: Path, **variables: str
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run a command while the block runs; the block has to end it. Writes `folder/NODE.log`."""
        with (folder / f"{node}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(node, command),
                cwd=folder,
                env=environment(**variables),
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=30)

    @contextlib.contextmanager
    def reachable_by_ssh(self) -> Iterator[Path]:
        """Run an ssh server on each node; yield a folder for PATH with a trusted `ssh` client."""
        keys = Path(tempfile.mkdtemp(prefix="ssh-", dir=self.folder))
        (tools := keys / "bin").mkdir()
        for name in ("host", "user"):
            subprocess.run(
                ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(keys / name)], check=True
            )
        server = {
            "HostKey": keys / "host",
            "AuthorizedKeysFile": keys / "user.pub",
            "PidFile": "none",
            "PermitRootLogin": "yes",
            "StrictModes": "no",
            "UsePAM": "no",
        }
        (keys / "sshd_config").write_text(
            "".join(f"{key} {value}\n" for key, value in server.items())
        )
        options = [
            "-q",
            "-F",
            "none",
            "-i",
            str(keys / "user"),
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
        ]
        (tools / "ssh").write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} {shlex.join(options)} "$@"\n'
        )
        (tools / "ssh").chmod(0o755)
        Path("/run/sshd").mkdir(exist_ok=True)  # Debian's sshd insists on it
        daemon = ["/usr/sbin/sshd", "-D", "-f", str(keys / "sshd_config")]
        with self.started("node1", daemon, keys), self.started("node2", daemon, keys):
            yield tools


def environment(**variables: str) -> dict[str, str]:
    """Return the caller's environment, with the node's network interface for gloo."""
    return {
        **os.environ,
        "DVC_NO_ANALYTICS": "1",
        "DS_BUILD_OPS": "0",
        "GLOO_SOCKET_IFNAME": "cable",
        **variables,
    }


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[TwoNodes]:
    """Create the two nodes while the block runs; skip the test if that is impossible."""
    skip_without("ip", "nsenter", "unshare", "taskset")
    if os.geteuid() != 0 or len(os.sched_getaffinity(0)) < 2:
        pytest.skip("two nodes on one machine need root and two cores")
    namespaces = {node: f"slipway-{os.getpid()}-{node}" for node in ADDRESSES}
    (folder / "hosts").write_text(
        "127.0.0.1 localhost\n"
        + "".join(f"{address} {node}\n" for node, address in ADDRESSES.items())
    )
    try:
        for namespace in namespaces.values():
            if subprocess.run(["ip", "netns", "add", namespace], capture_output=True).returncode:
                pytest.skip("network namespaces cannot be made here")
        first, second = namespaces.values()
        _ip(f"link add cable netns {first} type veth peer name cable netns {second}")
        for node, namespace in namespaces.items():
            _ip(f"-n {namespace} address add {ADDRESSES[node]}/24 dev cable")
            _ip(f"-n {namespace} link set cable up")
            _ip(f"-n {namespace} link set lo up")
        yield TwoNodes(folder, namespaces)
    finally:
        for namespace in namespaces.values():
            subprocess.run(["ip", "netns", "delete", namespace], capture_output=True)


def skip_without(*tools: str) -> None:
    """Skip the test if one of the programs is not installed."""
    missing = [
        tool for tool in tools if not (shutil.which(tool) or shutil.which(tool, path="/usr/sbin"))
    ]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed")


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True)
