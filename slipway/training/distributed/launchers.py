"""Reads rank and number of processes from the environment variables of each launcher.

torchrun, the DeepSpeed launcher, Open MPI's mpirun and Slurm's srun start one process per device
on every node. Without one of them Lightning starts the processes of this node. Variables that do
not fit together are refused.
"""

import os
import shlex
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from lightning_fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning_fabric.plugins.environments.lightning import LightningEnvironment
from lightning_fabric.plugins.environments.slurm import SLURMEnvironment

from slipway.system.errors import UnavailableError

# Not SLIPWAY_...: such variables belong to the service, which refuses unknown ones.
RELAUNCH = "TRAIN_LAUNCHER"


@dataclass(frozen=True)
class Launch:
    """One process of a launcher that starts the same number of processes on each node."""

    launcher: str  # name of the launcher in messages
    rank: int  # rank over all nodes
    local_rank: int
    num_local: int  # processes on this node
    num_nodes: int
    main_address: str  # address of the node of rank 0, where all ranks meet
    main_port: int

    @property
    def world_size(self) -> int:
        return self.num_local * self.num_nodes


def find_launch(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """Read the launcher's variables; return None if Lightning starts the processes.

    Raises UnavailableError for an unknown launcher or an unequal number of processes per node.
    """
    # The inner launcher comes first: torchrun and mpirun also run inside srun.
    for variable, read in _READERS.items():
        if variable in environment:
            return read(environment)
    if int(environment.get("PMI_SIZE", "1")) > 1:
        raise UnavailableError(
            "an mpirun that is not Open MPI's started this process. Use Open MPI, torchrun or "
            "srun: docs/how-to/scaling.md."
        )
    return None


def starts_elsewhere() -> bool:
    """Return True if TRAIN_LAUNCHER starts the training, perhaps on other machines."""
    return bool(os.environ.get(RELAUNCH, "").strip())


def relaunch(module: str) -> None:
    """Replace this process by the command in TRAIN_LAUNCHER followed by `python -m MODULE`.

    Does nothing without that variable and inside a launched process. The process id stays the
    same, so signals and the exit code are the launcher's.
    """
    text = os.environ.pop(RELAUNCH, "")
    if not text.strip() or find_launch():
        return
    try:
        command = shlex.split(text)
        os.execvp(command[0], [*command, sys.executable, "-u", "-m", module])
    except (OSError, ValueError) as error:
        raise UnavailableError(
            f"{RELAUNCH} is {text!r}, which cannot be started: {error}. Expected a command such "
            "as 'srun'."
        ) from None


class LaunchedEnvironment(ClusterEnvironment):
    """Tells Lightning the rank and the address of a process that a launcher started."""

    def __init__(self, launch: Launch) -> None:
        super().__init__()
        self._launch = launch

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return self._launch.main_address

    @property
    def main_port(self) -> int:
        return self._launch.main_port

    @staticmethod
    def detect() -> bool:
        return find_launch() is not None

    def world_size(self) -> int:
        return self._launch.world_size

    def set_world_size(self, size: int) -> None:
        """Do nothing, because the launcher decides."""

    def global_rank(self) -> int:
        return self._launch.rank

    def set_global_rank(self, rank: int) -> None:
        """Do nothing, because the launcher decides."""

    def local_rank(self) -> int:
        return self._launch.local_rank

    def node_rank(self) -> int:
        return self._launch.rank // self._launch.num_local


def cluster_environment(launch: Launch | None) -> ClusterEnvironment:
    """Return the cluster environment that the trainer uses.

    It is explicit even without a launcher. Otherwise Lightning would mistake any shell inside a
    Slurm allocation for a Slurm task.
    """
    return LaunchedEnvironment(launch) if launch else LightningEnvironment()


def _torchrun(environment: Mapping[str, str]) -> Launch:
    return _from_torch_variables("torchrun", environment, num_local="LOCAL_WORLD_SIZE")


def _deepspeed(environment: Mapping[str, str]) -> Launch:
    return _from_torch_variables("the DeepSpeed launcher", environment, num_local="LOCAL_SIZE")


def _from_torch_variables(launcher: str, environment: Mapping[str, str], num_local: str) -> Launch:
    """Read the variables of torch.distributed; `num_local` names that of the processes per node."""
    local = int(environment[num_local])
    return Launch(
        launcher=launcher,
        rank=int(environment["RANK"]),
        local_rank=int(environment["LOCAL_RANK"]),
        num_local=local,
        num_nodes=_num_nodes(launcher, int(environment["WORLD_SIZE"]), local),
        main_address=environment["MASTER_ADDR"],
        main_port=int(environment["MASTER_PORT"]),
    )


def _open_mpi(environment: Mapping[str, str]) -> Launch | None:
    size = int(environment["OMPI_COMM_WORLD_SIZE"])
    local = int(environment["OMPI_COMM_WORLD_LOCAL_SIZE"])
    if size == 1:
        return None
    num_nodes = _num_nodes("mpirun", size, local)
    if num_nodes > 1 and "MASTER_ADDR" not in environment:
        raise UnavailableError(
            "mpirun does not say on which node rank 0 runs. Add -x MASTER_ADDR=HOST to it."
        )
    return Launch(
        launcher="mpirun",
        rank=int(environment["OMPI_COMM_WORLD_RANK"]),
        local_rank=int(environment["OMPI_COMM_WORLD_LOCAL_RANK"]),
        num_local=local,
        num_nodes=num_nodes,
        main_address=environment.get("MASTER_ADDR", "127.0.0.1"),
        # The namespace differs between two runs of mpirun and is the same within one.
        main_port=_port(environment, zlib.crc32(environment.get("PMIX_NAMESPACE", "").encode())),
    )


def _slurm(environment: Mapping[str, str]) -> Launch | None:
    size = int(environment["SLURM_STEP_NUM_TASKS"])
    if size == 1:  # may be a shell, in which Lightning starts the processes
        return None
    nodes = int(environment["SLURM_STEP_NUM_NODES"])
    per_node = environment["SLURM_STEP_TASKS_PER_NODE"]
    if size % nodes or per_node.partition("(")[0] != str(size // nodes):
        raise UnavailableError(
            f"Slurm started {size} processes as {per_node} on {nodes} nodes, expected equally "
            "many. Use --ntasks-per-node."
        )
    return Launch(
        launcher="Slurm",
        rank=int(environment["SLURM_PROCID"]),
        local_rank=int(environment["SLURM_LOCALID"]),
        num_local=size // nodes,
        num_nodes=nodes,
        main_address=environment.get("MASTER_ADDR")
        or SLURMEnvironment.resolve_root_node_address(environment["SLURM_STEP_NODELIST"]),
        main_port=_port(environment, int(environment["SLURM_JOB_ID"])),
    )


def _num_nodes(launcher: str, world_size: int, num_local: int) -> int:
    if world_size % num_local:
        raise UnavailableError(
            f"{launcher} started {world_size} processes, {num_local} of them on this node, "
            "expected equally many on each."
        )
    return world_size // num_local


def _port(environment: Mapping[str, str], number: int) -> int:
    """Return MASTER_PORT, or else a port below Linux's ephemeral ports, derived from `number`."""
    return int(environment.get("MASTER_PORT") or 15000 + number % 10000)


# Readers of the launchers, by a variable that only the launcher sets.
_READERS = {
    "TORCHELASTIC_RUN_ID": _torchrun,
    "CROSS_SIZE": _deepspeed,
    "OMPI_COMM_WORLD_SIZE": _open_mpi,
    "SLURM_STEP_ID": _slurm,
}
