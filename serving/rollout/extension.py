"""Hooks rollouts into the service: swaps models, routes canary traffic, and serves `/rollout`."""

from serving.extension import Extension, Hooks
from serving.rollout.endpoint import rollout_routes
from serving.rollout.reconciler import RolloutReconciler, RolloutSettings
from serving.rollout.state import read_rollout
from serving.rollout.store import settings_of
from serving.settings import Settings
from serving.worker import ModelWorker


def _attach(worker: ModelWorker) -> Hooks:
    reconciler = RolloutReconciler(worker)
    return Hooks(
        routes=rollout_routes(worker.settings, reconciler),
        select_model=reconciler.begin,
        on_wrong_answer=reconciler.note_wrong,
        model_info=lambda: {"rolled_out": reconciler.model_info()},
        status={"rollout": reconciler.status},
        start=reconciler.start,
        stop=reconciler.stop,
    )


def initial_settings(settings: Settings) -> Settings:
    """Settings for the model that a start would serve. Raises SlipwayError if the state cannot be read."""
    if settings.accept_draft:  # as RolloutReconciler.begin has it
        return settings
    return settings_of(settings, read_rollout(settings.state).stable)


EXTENSION = Extension("rollout", _attach, RolloutSettings, initial_settings=initial_settings)
