"""Loads the model that the settings name."""

from dataclasses import fields

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Certificate
from slipway.predictor.loader import open_model
from slipway.serving.models.model import ServedModel
from slipway.serving.settings import Settings


def load_model(
    settings: Settings, certified: tuple[LoadedBundle, Certificate] | None = None
) -> ServedModel:
    """Verify the bundle, select a runtime, load the model and warm it up.

    `certified` is the result of `read_certified`, if the caller has it already. Raises SlipwayError
    with the reason if the model must not or cannot be served.
    """
    model = open_model(settings.model_options(), certified)
    return ServedModel(
        **{field.name: getattr(model, field.name) for field in fields(model)}, settings=settings
    )
