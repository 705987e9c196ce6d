"""A certified model with the settings of the service that loaded it."""

from dataclasses import dataclass, field

from slipway.predictor.model import CertifiedModel
from slipway.serving.settings import Settings


@dataclass(frozen=True, eq=False)
class ServedModel(CertifiedModel):
    """A certified model, with the settings that it was loaded with."""

    settings: Settings = field(kw_only=True)
