"""Builds the parts of a trainer, shared by the train stage, the audit, pruning and the profiler."""

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from slipway.config.training import TrainParams
from slipway.data.augmentation.plan import AugmentPlan, text_operations
from slipway.inputs.contract import InputContract
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.kinds.registry import kind_of
from slipway.system.malloc import GATHERED_BLOCK_BYTES, keep_freed_pages
from slipway.system.user_code import is_user_code
from slipway.training.batches.batches import (
    ImageChanges,
    StepShape,
    TextChanges,
    TrainingBatches,
    ValidationBatches,
)
from slipway.training.batches.shuffled_blocks import BlockShuffle, block_shuffle
from slipway.training.distributed.execution import apply_execution
from slipway.training.distributed.placement import Placement
from slipway.training.distributed.strategies import actual_setup, check_actual, trainer_arguments
from slipway.training.job import TrainingData, own_threads
from slipway.training.module import PipelinedModule, TrainingModule
from slipway.training.networks.frozen_parts import FreezeCallback, freeze_body
from slipway.training.networks.networks import Network
from slipway.training.recipe.optimizers import fuses_optimizer
from slipway.training.recipe.precision import adapt_to_half, allow_float16_on_cpu


def prepare_process(
    params: TrainParams, placement: Placement, network: Network, threads: int | None = None
) -> None:
    """Configure this process for training: threads, memory, precision, and layout of the weights.

    `threads` is the number of threads of the training that is resumed. The default is this
    process's share of the node's cores; on a GPU torch decides.
    """
    # Deterministic mode would fill every new tensor, also DeepSpeed's buckets of 400 MB per step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    if placement.gathers_weights and placement.accelerator == "cpu":
        keep_freed_pages(GATHERED_BLOCK_BYTES)
    else:
        keep_freed_pages()
    if threads := threads or own_threads(placement):
        torch.set_num_threads(threads)
    freeze_body(network, params)
    if placement.half_dtype:
        adapt_to_half(network, placement.half_dtype)
        if placement.accelerator == "cpu" and placement.half_dtype == torch.float16:
            allow_float16_on_cpu()
    if placement.precision == "32-true":
        # torch allows TF32 in convolutions by default: 10 bits of mantissa, not 23.
        torch.backends.cudnn.allow_tf32 = False
    apply_execution(network, params, placement, network.spec.task)


def step_arguments(
    params: TrainParams, placement: Placement, shape: StepShape, work: Path
) -> dict[str, Any]:
    """Return the keyword arguments of `pl.Trainer` that define an optimizer step and its device."""
    # Without DeepSpeed the non-finite guard clips.
    clip_norm = params.gradient_clip_norm if placement.zero_stage else None
    joins_later = params.freeze_epochs > 0 and not params.freezes_body
    freezes = joins_later or is_user_code(params.network)  # user code may skip a layer
    return {
        **trainer_arguments(
            placement,
            shape.per_device,
            freezes=freezes,
            num_micro_batches=shape.num_micro_batches,
        ),
        "accumulate_grad_batches": shape.num_accumulated,
        "gradient_clip_val": clip_norm,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "use_distributed_sampler": False,
        "deterministic": params.deterministic,
        "default_root_dir": work,
    }


def training_batches(
    data: TrainingData,
    params: TrainParams,
    shape: StepShape,
    rank: int,
    seed: int,
    *,
    on_gpu: bool,
) -> TrainingBatches:
    """Return the augmented training batches that process `rank` reads."""
    changes = image_changes(data.plan, data.manifest.input, on_gpu)
    dtype = kind_of(data.manifest.task).target.dtype
    soft = data.soft.answers if data.soft else None
    contract = data.manifest.input
    texts = None
    if isinstance(contract, TextContract) and text_operations(data.plan):
        texts = TextChanges(data.plan, contract.pair_separator)
    return TrainingBatches(
        data.train,
        shape,
        rank,
        seed,
        changes,
        dtype,
        soft,
        buckets=contract.varies_in_length,
        texts=texts,
        blocks=shuffled_blocks(data, params),
    )


def shuffled_blocks(data: TrainingData, params: TrainParams) -> BlockShuffle | None:
    """Return the block sizes for shuffling by blocks, or None to shuffle single rows."""
    if params.shuffle_buffer_mib is None:
        return None
    return block_shuffle([split.inputs for split in data.train], params.shuffle_buffer_mib)


def validation_batches(
    data: TrainingData, params: TrainParams, world_size: int, rank: int
) -> ValidationBatches:
    """Return the validation batches that process `rank` of `world_size` reads."""
    dtype = kind_of(data.manifest.task).target.dtype
    return ValidationBatches(data.val, params.max_batch_per_device, world_size, rank, dtype)


def training_module(
    network: Network,
    params: TrainParams,
    seed: int,
    data: TrainingData,
    batches: TrainingBatches,
    *,
    placement: Placement | None = None,
) -> TrainingModule:
    is_pipeline = placement is not None and placement.strategy == "pipeline"
    return (PipelinedModule if is_pipeline else TrainingModule)(
        network,
        params,
        seed,
        batches.num_steps,
        batches.ids,
        data.mean_weight,
        data.class_weights(params),
        data.soft.distillation if data.soft else None,
        model_parallel=(placement.model_parallel if placement else None) or 1,
        fused_optimizer=placement is not None and fuses_optimizer(placement),
        head=data.head,
    )


def freeze_callbacks(network: Network, params: TrainParams) -> list[pl.Callback]:
    """Return the callback that freezes parts of the network; none if `params` freeze nothing."""
    return [FreezeCallback(network, params)] if params.freeze_epochs else []


def image_changes(plan: AugmentPlan, contract: InputContract, on_gpu: bool) -> ImageChanges | None:
    """Return the settings for augmenting training images; None for a table or texts.

    The GPU augments the images if `on_gpu`, else the CPU.
    """
    if not isinstance(contract, ImageContract):
        return None
    return ImageChanges(plan, contract.size_px, on_device=on_gpu)


class SetupCheck(pl.Callback):
    """Stops a run before its first step if its actual setup differs from the requested one."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_actual(self._placement.expected, actual_setup(trainer))
