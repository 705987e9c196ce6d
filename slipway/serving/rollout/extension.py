"""Adds rollouts to the service: swaps models, routes canary traffic, and serves `/rollout`."""

from slipway.serving.extension import Extension, Hooks
from slipway.serving.rollout.endpoint import rollout_routes
from slipway.serving.rollout.reconciler import RolloutReconciler, RolloutSettings
from slipway.serving.rollout.state import read_rollout
from slipway.serving.rollout.store import settings_of
from slipway.serving.settings import Settings
from slipway.serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    reconciler = RolloutReconciler(worker)
    return Hooks(
        routes=rollout_routes(worker.settings, reconciler),
        select_model=reconciler.initial_settings,
        on_wrong_answer=reconciler.note_wrong,
        model_info=lambda: {"rolled_out": reconciler.model_info()},
        status={"rollout": reconciler.status},
        start=reconciler.start,
        stop=reconciler.stop,
    )


def initial_settings(settings: Settings) -> Settings:
    """Return the settings with the rolled-out model, if there is one, in place of SLIPWAY_BUNDLE.

    Raises SlipwayError if the state is invalid.
    """
    if settings.accept_draft:  # as RolloutReconciler.initial_settings does
        return settings
    return settings_of(settings, read_rollout(settings.state).stable)


EXTENSION = Extension("rollout", _attach, RolloutSettings, initial_settings=initial_settings)
