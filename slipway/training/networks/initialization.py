"""Networks before their first step: random or pretrained weights."""

import torch

from slipway.config.params import Params
from slipway.config.sections import TrainParams
from slipway.inputs.images import MAX_PIXELS, ImageContract
from slipway.kinds.registry import is_classification
from slipway.training.networks.networks import Network, NetworkSpec, build_network
from slipway.training.networks.pretrained import (
    load_pretrained,
    pretrained_file,
    pretrained_normalisation,
)


def initial_network(seed: int, params: TrainParams, spec: NetworkSpec) -> Network:
    """Build a network with weights drawn from `seed`, and load pretrained ones if requested."""
    torch.manual_seed(seed)
    network = build_network(spec)
    if pretrained := pretrained_file(params):
        load_pretrained(network, pretrained)
    return network


def image_network_spec(params: Params) -> NetworkSpec:
    """Describe the network for images before there is packed data.

    If `data.classes` is null it has two outputs. The mean of the pixels and their largest number
    are placeholders that change no shape.
    """
    data, wanted = params.data, params.precompute
    mean, std = [0.5] * wanted.channels, [0.25] * wanted.channels
    if params.train.pretrained:
        mean, std = pretrained_normalisation(params.train.network, wanted.channels)
    classes = data.classes or ["one", "two"]
    return NetworkSpec(
        task=data.task,
        name=params.train.network,
        arguments=params.train.network_arguments,
        classes=classes if is_classification(data.task) else [],
        input=ImageContract(
            kind="images",
            transform=None,
            size_px=wanted.image_size_px,
            channels=wanted.channels,
            resize_mode=wanted.resize_mode,
            interpolation=wanted.interpolation,
            max_pixels=MAX_PIXELS,
        ),
        mean=mean,
        std=std,
        target_scale=None,
    )
