"""Writes the augmentation plan, the offline copies where they are asked for, and a picture of what it does."""

from pathlib import Path

from slipway import files
from slipway.command import run_stage
from slipway.data.augmentation import operations, plan_from_params, write_plan
from slipway.data.packed import open_split, read_manifest
from slipway.params import Params
from slipway.training.contact_sheet import contact_sheet
from slipway.training.offline_copies import write_copies

PACKED = Path("data/packed")
AUGMENTED = Path("data/augmented")
SHEET = Path("reports/augment.png")


def run(params: Params) -> None:
    """Plan the augmentation; ParamsError when a forbidden operation is asked for."""
    plan = plan_from_params(params.augment, params.seed)
    manifest = read_manifest(PACKED)
    train = open_split(PACKED, manifest, "train", verify=True)
    num_copies = params.augment.offline_copies
    with files.new_directory(AUGMENTED) as folder:
        if num_copies:
            plan = plan.model_copy(update={"offline": write_copies(train, plan, num_copies, folder / "train")})
        write_plan(folder, plan)
    files.write_bytes(SHEET, contact_sheet(train, plan, manifest))
    print(f"operations: {', '.join(operations(plan)) or 'none'}; offline copies of each training row: {num_copies}; see {SHEET}")


if __name__ == "__main__":
    run_stage(run)
