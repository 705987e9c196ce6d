"""Options for loading a model: the paths of its files, and how to run it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ProviderOption = Literal["auto", "cpu", "cuda", "onnxruntime_tensorrt", "tensorrt"]
Variant = Literal[
    "auto", "fp32", "fp16", "int8", "int8_dynamic", "int8_tensorrt", "pruned", "pruned_int8"
]
# For max_batch_size "auto": more than the queue usually holds, and quick to warm up.
DEFAULT_BATCH_SIZE = 32


@dataclass(frozen=True)
class ModelOptions:
    """The files of a model, the runtime to use, and the checks to apply when it is loaded."""

    bundle: Path
    certificate: Path
    engine: Path
    rebuilt_engine: Path  # built and certified on this machine
    engine_cache: Path  # of the provider onnxruntime_tensorrt
    num_threads: int  # of ONNX Runtime
    may_use_one_thread: bool = True  # quick models are faster on one thread
    provider: ProviderOption = "auto"
    variant: Variant = "auto"
    max_batch_size: Literal["auto"] | int = "auto"
    accept_draft: bool = False
    accept_missed_gates: bool = False
    signers: tuple[Path, ...] = ()  # public keys, one of which must have signed the bundle
    signer_list: Path | None = None  # of keys that expire or were revoked
