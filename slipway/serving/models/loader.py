"""Loads the model of the settings."""

from dataclasses import fields

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Certificate
from slipway.predictor.loader import open_model
from slipway.serving.models.model import ServedModel
from slipway.serving.settings import Settings


def load_model(
    settings: Settings, certified: tuple[LoadedBundle, Certificate] | None = None
) -> ServedModel:
    """Check, select, load and warm up a model. Raises SlipwayError with the reason.

    `certified` is the result of `read_certified`, if the caller has it already.
    """
    model = open_model(settings.model_options(), certified)
    return ServedModel(
        **{field.name: getattr(model, field.name) for field in fields(model)}, settings=settings
    )
