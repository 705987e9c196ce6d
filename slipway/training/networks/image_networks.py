"""Networks for images: the small residual network, those of timm, and the user's own."""

import difflib

import torch
from torch import Tensor, nn

from slipway.config.network_arguments import SmallResnetArguments
from slipway.inputs.images import ImageContract
from slipway.system.errors import ParamsError
from slipway.system.user_code import is_user_code
from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments
from slipway.training.networks.small_resnet import SmallResnet
from slipway.training.networks.user_network import user_backbone

_TIMM = "timm/"


class ImageNetwork(Network):
    """Maps (rows, height, width, channels) uint8 in [0, 255] to (rows, classes) logits.

    For a numeric target the output is (rows, 1) in its unit.
    """

    pixel_mean: Tensor
    pixel_scale: Tensor

    def __init__(self, backbone: nn.Module, spec: NetworkSpec) -> None:
        super().__init__(backbone, spec)
        per_channel = (1, -1, 1, 1)
        mean = torch.tensor(spec.mean).mul(255).view(per_channel)
        scale = torch.tensor(spec.std).mul(255).reciprocal().view(per_channel)
        self.register_buffer("pixel_mean", mean, persistent=False)
        self.register_buffer("pixel_scale", scale, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Map images (B, H, W, C) uint8 to outputs (B, K)."""
        return self.to_target_unit(self.backbone(self.backbone_inputs(images)))

    def backbone_inputs(self, images: Tensor) -> Tensor:
        """Map images (B, H, W, C) uint8 to normalised pixels (B, C, H, W) float32."""
        # The cast comes first: TensorRT transposes no uint8.
        pixels = images.to(torch.float32).permute(0, 3, 1, 2)
        return (pixels - self.pixel_mean) * self.pixel_scale

    def misfit(self, error: Exception) -> str:
        """Return a sentence on why the network cannot read images of this size, and the remedy."""
        height, width, channels = self.spec.input.shape
        return (
            f"cannot take images of {height}x{width} px with {channels} "
            f"channels: {error}. Change precompute.image_size_px, or give the size in "
            "train.network_arguments (img_size for many of timm)."
        )


def image_network(spec: NetworkSpec) -> ImageNetwork:
    """Build the network of a spec for images. Raises ParamsError for an unknown name."""
    assert isinstance(spec.input, ImageContract)
    channels = spec.input.channels
    if spec.name == "small_resnet":
        arguments = parse_arguments(spec, SmallResnetArguments)
        return ImageNetwork(SmallResnet(arguments, channels, spec.num_outputs), spec)
    if spec.name.startswith(_TIMM):
        return ImageNetwork(_timm_network(spec, channels), spec)
    if is_user_code(spec.name):
        height, width, _ = spec.input.shape
        return ImageNetwork(user_backbone(spec, (channels, height, width)), spec)
    raise ParamsError(
        f"train.network is {spec.name!r}, expected 'small_resnet' or 'timm/NAME', for example "
        "'timm/resnet18'."
    )


def _timm_network(spec: NetworkSpec, channels: int) -> nn.Module:
    import timm

    name = spec.name.removeprefix(_TIMM)
    if not timm.is_model(name):
        close = difflib.get_close_matches(name, timm.list_models(), n=3, cutoff=0.5)
        known = " or ".join(repr(_TIMM + each) for each in close)
        hint = f"; did you mean {known}?" if close else "."
        raise ParamsError(
            f"train.network is 'timm/{name}', which timm {timm.__version__} lacks{hint}"
        )
    reserved = sorted({"pretrained", "in_chans", "num_classes"} & set(spec.arguments))
    if reserved:
        raise ParamsError(
            f"train.network_arguments names {', '.join(reserved)}, which Slipway sets itself from "
            "the data. Remove it."
        )
    try:
        network: nn.Module = timm.create_model(
            name,
            pretrained=False,
            in_chans=channels,
            num_classes=spec.num_outputs,
            **spec.arguments,
        )
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:
        raise ParamsError(
            f"timm/{name} refuses train.network_arguments {spec.arguments}: {error}"
        ) from error
    return network
