"""augment: plans the augmentation, writes offline copies if requested, and shows the data."""

from pathlib import Path

from slipway.artifacts.locations import AUGMENTED, PACKED
from slipway.config.params import Params
from slipway.config.stage_run import run_stage
from slipway.data.augmentation.plan import (
    AugmentPlan,
    operations,
    plan_from_params,
    text_operations,
    without_operations,
    write_plan,
)
from slipway.data.engine.rows import SPLITS
from slipway.data.store.packed import PackedSplit, open_split, read_manifest
from slipway.inputs.images import ImageContract
from slipway.inputs.texts import TextContract
from slipway.kinds.registry import kind_of
from slipway.reports.pages.data_page import data_page
from slipway.system import files
from slipway.training.augmentation.contact_sheet import contact_sheet
from slipway.training.augmentation.offline_copies import write_copies

SHEET = Path("reports/augment.png")
PAGE = Path("reports/data.html")


def run(params: Params) -> None:
    """Plan the augmentation; ParamsError if params.yaml requests a forbidden operation."""
    requested = plan_from_params(params.augment, params.seed)
    manifest = read_manifest(PACKED)
    train = open_split(PACKED, manifest, "train", verify=True)
    has_pixels = kind_of(manifest.task).input.has_pixels
    plan = requested if has_pixels else without_operations(requested)
    with files.new_directory(AUGMENTED) as folder:
        if params.augment.offline_copies and isinstance(manifest.input, ImageContract):
            copies = write_copies(
                train, plan, params.augment.offline_copies, manifest.input.size_px, folder / "train"
            )
            plan = plan.model_copy(update={"offline": copies})
        write_plan(folder, plan)
    files.write_bytes(SHEET, contact_sheet(train, plan, manifest))
    splits = {
        name: open_split(PACKED, manifest, name) for name in SPLITS if name in manifest.splits
    }
    files.write_text(PAGE, data_page(splits, manifest))
    notes = _notes(params, requested, manifest.input, train)
    print("\n".join(notes) + f"; see {SHEET} and {PAGE}")


def _notes(
    params: Params, requested: AugmentPlan, contract: object, train: PackedSplit
) -> list[str]:
    """Describe the augmentation, and name parameters without effect."""
    names, copies = operations(requested), params.augment.offline_copies
    if isinstance(contract, TextContract):
        return [f"operations: {', '.join(text_operations(requested)) or 'none'}"]
    if not isinstance(contract, ImageContract):
        unused = [*names, "offline_copies"] if copies else names
        effect = f": without effect are {', '.join(unused)}" if unused else ""
        return [f"only images are augmented{effect}"]
    lines = []
    grey = [name for name in names if name in ("saturation", "hue")]
    if contract.channels == 1 and grey:
        lines.append(f"without effect on grey images: {', '.join(grey)}")
    if copies and requested.mixes:
        lines.append(
            "offline copies are not mixed: mixup_alpha and cutmix_alpha act during training"
        )
    if train.inputs.shape[1] > contract.size_px and "random_resized_crop" not in names:
        lines.append(
            f"training images are stored with {train.inputs.shape[1]} px and only shrunk to "
            f"{contract.size_px} px: set augment.random_resized_crop, or set "
            "precompute.train_size_px to null"
        )
    return [
        *lines,
        f"operations: {', '.join(names) or 'none'}; offline copies of each training row: {copies}",
    ]


if __name__ == "__main__":
    run_stage(run)
