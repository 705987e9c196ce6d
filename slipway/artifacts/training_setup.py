"""Records in `model.json` of how a training ran: strategy and precision, and its processes."""

from typing import Literal

from slipway.system.contract import Contract


class TrainingSetup(Contract):
    """Strategy, precision, devices and sharding of a training, as requested or as run."""

    strategy: str  # "single", "ddp", "fsdp", "deepspeed_stage_2"
    precision: str  # "32-true", "bf16-mixed", "16-mixed"
    accelerator: str  # "cpu", "gpu"
    world_size: int | Literal["auto"]  # processes over all nodes
    zero_stage: int | None  # null in a request, or without DeepSpeed
    offload: str | None  # "optimizer", "optimizer_and_parameters": kept in the host's memory
    parameter_dtype: str | None  # dtype in forward and backward; null in a request
    # Processes that share one copy of the network; null if none do.
    model_parallel: int | None = None
    # Epochs without a lower validation loss that end the training; null: never early.
    early_stopping_patience: int | Literal["auto"] | None = None


class RunSegment(Contract):
    """The process layout of a training from `first_step` on.

    After a change the batches stay the same, but results may differ in the last bits.
    """

    first_step: int
    strategy: str
    world_size: int
    per_device: int  # rows of a batch
    threads: int | None = None  # threads of each process on a CPU; null on a GPU
    model_parallel: int | None = None  # same as in the setup

    def has_same_layout(self, other: "RunSegment") -> bool:
        """Return True if both segments are equal apart from their first step."""
        return self.model_copy(update={"first_step": other.first_step}) == other

    def __str__(self) -> str:
        processes = f"{self.world_size} process{'es' * (self.world_size > 1)}"
        count = self.threads or 0
        threads = f" and {count} thread{'s' * (count > 1)} each" if count else ""
        copies = f", {self.model_parallel} in a copy," if self.model_parallel else ""
        rows = f"{self.per_device} rows a batch"
        return f"{self.strategy} on {processes}{copies} with {rows}{threads}"
