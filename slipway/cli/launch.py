"""The commands `slipway launch ...`, which write a script that trains on several machines.

The templates are in `launch/`.
"""

import shlex
import sys
from pathlib import Path

import click

from slipway.cli.command import say
from slipway.config.params import load_params
from slipway.serving.process.packing import CODE, write_own_wheel
from slipway.system import files
from slipway.system.assets import asset
from slipway.system.errors import ParamsError

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


def write_script(
    name: str,
    nodes: int,
    processes: int,
    gpus: int,
    interface: str | None = None,
    setup: str = "",
) -> Path:
    """Write launch/NAME into the current folder, for this interpreter; return its path.

    `processes` and `gpus` are those of each node; `interface` is the network card between nodes,
    `setup` the command that installs Slipway on a new machine. Raises ParamsError if there is a
    file of that name, because it may have been edited.
    """
    path = Path(name)
    if path.exists():
        raise ParamsError(
            f"{name} exists, expected a new file. Edit it, or remove it and run this again."
        )
    values = {
        "nodes": str(nodes),
        "processes": str(processes),
        "gpus": str(gpus),
        # Not the file that a link of a virtual environment leads to: it has other packages.
        "bin": shlex.quote(str(Path(sys.executable).absolute().parent)),
        "interface": _interface(interface),
        "setup": setup,
    }
    template = asset(f"launch/{name}")
    text = template.read_text(encoding="utf-8")
    for key, value in values.items():
        text = text.replace(f"@{key}@", value)
    files.write_text(path, text)
    path.chmod(template.stat().st_mode & 0o777)
    return path


def _interface(name: str | None) -> str:
    """Return the line that chooses the network card; a guess would break a working fabric."""
    if name is None:
        return "# --interface NAME sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME here."
    quoted = shlex.quote(name)
    return f"export NCCL_SOCKET_IFNAME={quoted} GLOO_SOCKET_IFNAME={quoted}"


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
