"""A certified model that was loaded, with the service's settings at the time."""

from dataclasses import dataclass, field

from slipway.predictor.model import CertifiedModel
from slipway.serving.settings import Settings


@dataclass(frozen=True, eq=False)
class ServedModel(CertifiedModel):
    """A loaded, certified model, with the settings that it was loaded with."""

    settings: Settings = field(kw_only=True)
