"""A model manifest that no training has written."""

from slipway.artifacts.training_setup import RunSegment, TrainingSetup
from slipway.training.networks.networks import ModelManifest, NetworkSpec
from tests.project_params import PROJECT

SETUP = TrainingSetup(
    strategy="single",
    precision="32-true",
    accelerator="cpu",
    world_size=1,
    zero_stage=None,
    offload=None,
    parameter_dtype="float32",
)


def model_manifest(network: NetworkSpec) -> ModelManifest:
    """Return a manifest for `network`; `save_checkpoint` fills in the digest of the weights."""
    return ModelManifest(
        format_version=5,
        network=network,
        num_parameters=1,
        weights_sha256="",
        epochs=1,
        stopped_early=False,
        kept_epoch=1,
        metrics={},
        requested=SETUP,
        actual=SETUP,
        segments=[RunSegment(first_step=0, strategy="single", world_size=1, per_device=16)],
        seed=0,
        params=PROJECT.train.model_dump(mode="json"),
        digests={},
        user_code=[],
        versions={},
        git_revision=None,
    )
