"""Checks for the later stages: the network, the machine, the engine, the reference model.

torch, Lightning and timm take seconds to import. They are imported only if there is a GPU, or if
params.yaml names something that needs them.
"""

from pathlib import Path

from slipway.config.params import Params
from slipway.config.training import TrainParams
from slipway.kinds.inputs import ENCODER
from slipway.kinds.registry import kind_of
from slipway.planning.packages import missing_network
from slipway.runtimes.compilation import why_no_engine
from slipway.runtimes.runtime import why_no_cuda_driver
from slipway.system.errors import SlipwayError


def check_network(params: Params) -> None:
    """Raise ParamsError or UnavailableError if the network cannot be built, frozen or pruned.

    The arguments of our own networks are checked when params.yaml is read, so they are only built
    to be pruned.
    """
    train, is_pruned = params.train, _loses_channels(params)
    if missing_network(train):
        return  # `missing_packages` reports it
    has_file = train.pretrained is not None and train.network != ENCODER
    if not train.network.startswith("timm/") and not is_pruned and not has_file:
        return
    from slipway.training.networks.initialization import (
        image_network_spec,
        initial_network,
        pretrained_file,
        without_former_model,
    )

    pretrained_file(train)
    if not train.network.startswith("timm/") and not is_pruned:
        return
    # Classes and columns are known after `precompute` only; a former model's weights fit them.
    train = without_former_model(train)
    network = initial_network(params.seed, train, image_network_spec(params))
    if train.freeze_epochs:
        from slipway.training.networks.frozen_parts import parts_of

        parts_of(network)
    if is_pruned:
        from slipway.training.pruning.channels import prunable_chains

        prunable_chains(network, params.prune.sparsity)


def _loses_channels(params: Params) -> bool:
    """Return True for structured pruning that was not refused when params.yaml was read."""
    train = params.train
    has_groups = train.network_arguments.get("normalisation") == "group"
    has_pixels = kind_of(params.data.task).input.has_pixels
    return params.prune.kind == "structured" and has_pixels and not has_groups


def machine_mistakes(params: Params) -> list[str]:
    """List the settings of `train` that this machine cannot satisfy, and missing packages.

    With TRAIN_LAUNCHER other machines train, which cannot be checked here.
    """
    if not needs_the_machine(params.train):
        return []
    from slipway.planning.plan_checks import Findings, check_deepspeed, check_placement
    from slipway.training.distributed.execution import check_execution
    from slipway.training.distributed.launchers import starts_elsewhere
    from slipway.training.distributed.placement import this_host
    from slipway.training.distributed.state_on_disk import check_offload_path
    from slipway.training.job import step_shape

    if starts_elsewhere():
        return []
    findings, train = Findings(), params.train
    try:
        placement = check_placement(train, this_host(), findings)
        if placement is not None:
            check_deepspeed(placement, findings)
            step_shape(train, placement)
            check_execution(train, placement, params.data.task)
            check_offload_path(train.offload_path)
    except SlipwayError as error:
        findings.mismatches.append(str(error))
    return findings.mismatches


def needs_the_machine(train: TrainParams) -> bool:
    """Return True if the settings of `train` depend on this machine, so that it must be checked."""
    by_name = (train.accelerator, train.devices, train.strategy, train.precision)
    asks = train.compile or train.channels_last is True or train.num_nodes > 1
    return asks or any(value != "auto" for value in by_name) or why_no_cuda_driver() is None


def check_engine(params: Params) -> None:
    """Raise EngineError if an engine is required and cannot be built here."""
    if params.compile.require:
        why_no_engine(require=True)


def check_reference_model(params: Params) -> None:
    """Raise BundleError if `evaluate.reference_model` is not a bundle of the same task."""
    if params.evaluate.reference_model is not None:
        from slipway.export.reference_model import open_reference_of

        open_reference_of(Path(params.evaluate.reference_model), params.data.task)
