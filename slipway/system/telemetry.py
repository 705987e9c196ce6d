"""Switches off the usage reports of libraries, unless the user's environment allows them."""

import os

# Read by onnxruntime when it is imported, by BentoML, DVC, Ray, the Hugging Face hub, MLflow and
# Weights & Biases when used.
_SWITCHES = {
    "ORT_DISABLE_TELEMETRY": "1",
    "BENTOML_DO_NOT_TRACK": "True",
    "DVC_NO_ANALYTICS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "WANDB_ERROR_REPORTING": "false",
}


def switch_off_telemetry() -> None:
    """Set the libraries' opt-out variables in the environment, unless the user set them."""
    for name, value in _SWITCHES.items():
        os.environ.setdefault(name, value)
