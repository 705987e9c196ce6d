"""A small network for rows of numbers."""

from torch import Tensor, nn

from slipway.training.networks.networks import Network, NetworkSpec, parse_arguments

from .series import SeriesMlpArguments


class SeriesNetwork(Network):
    """Maps (rows, length) float32 to (rows, outputs)."""

    def forward(self, rows: Tensor) -> Tensor:
        return self.to_target_unit(self.backbone(rows))


def series_network(spec: NetworkSpec) -> SeriesNetwork:
    width = parse_arguments(spec, SeriesMlpArguments).width
    layers = [nn.Linear(spec.input.shape[0], width), nn.ReLU(), nn.Linear(width, spec.num_outputs)]
    return SeriesNetwork(nn.Sequential(*layers), spec)
