"""The files and folders of a project that one part writes and others read, from its root."""

from pathlib import Path

CLEAN = Path("data/clean")
SPLIT = Path("data/split")
PACKED = Path("data/packed")
AUGMENTED = Path("data/augmented")
MODEL = Path("artifacts/model")
TRAINED = Path("metrics/train.json")
LIVE = Path("reports/live")  # curves of the training
CALIBRATION = Path("artifacts/calibration.json")
OOD_SCORE = Path("artifacts/ood_score.safetensors")
PREDICTIONS = Path("artifacts/predictions.parquet")  # of the test rows
METRICS = Path("metrics/evaluate.json")
GATES = Path("metrics/gates.json")
PRUNED = Path("artifacts/pruned")
BUNDLE = Path("artifacts/bundle")
ENGINE = Path("artifacts/engine")
REBUILT_ENGINE = Path("artifacts/rebuilt_engine")  # built where the service runs
CERTIFICATE = Path("artifacts/certificate.json")
VERIFIED = Path("metrics/verify.json")
CAPACITY = Path("artifacts/capacity.json")  # measured by `slipway tune serving`
