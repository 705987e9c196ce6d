"""The commands `slipway launch ...`, which write a script that trains on several machines."""

from pathlib import Path

import click

from slipway.cli.command import say
from slipway.config.params import load_params
from slipway.project.launchers import write_script
from slipway.serving.process.packing import CODE, write_own_wheel

_PARAMS = Path("params.yaml")
_NODES = click.option(
    "--nodes", type=click.IntRange(min=1), help="Number of machines; by default train.num_nodes."
)
_GPUS = click.option(
    "--gpus-per-node",
    type=click.IntRange(min=0),
    help="GPUs of each machine; by default train.devices. 0: train.devices processes on CPUs.",
)
_INTERFACE = click.option(
    "--interface",
    metavar="NAME",
    help="Network card between the machines, such as eth1; by default the libraries choose.",
)


def _machines(nodes: int | None, gpus: int | None) -> tuple[int, int, int]:
    """Return nodes, processes and GPUs of each node: those named, or else those of params.yaml."""
    train = load_params(_PARAMS).train
    devices = train.devices if isinstance(train.devices, int) else 1
    if gpus is None:
        gpus = 0 if train.accelerator == "cpu" else devices
    return nodes or train.num_nodes, gpus or devices, gpus


@click.command()
@_NODES
@_GPUS
@_INTERFACE
def slurm(nodes: int | None, gpus_per_node: int | None, interface: str | None) -> None:
    """Write slurm.sbatch, which runs the project on the nodes of a Slurm allocation.

    The nodes share this folder and the environment of this command under the same paths.
    """
    path = write_script("slurm.sbatch", *_machines(nodes, gpus_per_node), interface)
    say(f"wrote {path}. Next: sbatch {path}")


@click.command()
@_NODES
@_GPUS
@_INTERFACE
def torchrun(nodes: int | None, gpus_per_node: int | None, interface: str | None) -> None:
    """Write torchrun.sh, which you start on every machine.

    The machines share this folder and the environment of this command under the same paths.
    """
    path = write_script("torchrun.sh", *_machines(nodes, gpus_per_node), interface)
    say(f"wrote {path}. Next: ./{path} 0 FIRST_NODE there, and with 1, 2, ... on the others")


@click.command()
@_GPUS
def skypilot(gpus_per_node: int | None) -> None:
    """Write skypilot.yaml, a task that trains on a rented machine with SkyPilot.

    Checkpoints and results go to a bucket of yours. Several machines would need a shared file
    system, see `slipway launch slurm`.
    """
    _, processes, _ = _machines(1, gpus_per_node)
    setup = "./install.sh"
    if Path.cwd().resolve() != CODE.resolve():
        wheel = write_own_wheel(Path.cwd())
        setup = f"pip install './{wheel.name}[train,serve-cpu,export]'"
    path = write_script("skypilot.yaml", 1, processes, processes, setup=setup)
    say(f"wrote {path}. Next: sky jobs launch --env BUCKET=s3://... --env NAME=... {path}")
