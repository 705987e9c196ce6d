"""Runs the data stages with the params of a proposal, in this process."""

import contextlib
import io
from pathlib import Path

from slipway.config.params import load_params
from slipway.project.creation import params_file
from slipway.project.proposal import ProjectProposal
from slipway.stages import clean, precompute, split


def run_data_stages(proposal: ProjectProposal, folder: Path) -> str:
    """Write params.yaml to the new `folder`, run the stages there, and return what they print."""
    folder.mkdir()
    (folder / "params.yaml").write_text(params_file(folder, proposal), encoding="utf-8")
    params = load_params(folder / "params.yaml")
    printed = io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed):
        for stage in (clean, split, precompute):
            stage.run(params)
    return printed.getvalue()
