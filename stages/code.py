"""code: one digest per stage of the code that it reaches, which the other stages have among their params."""

from pathlib import Path

from slipway.config.command import run_command
from slipway.kinds.code_digest import CODE_DIGESTS, recall, remember, stage_digest, stage_names
from slipway.preflight.project import check_project
from slipway.system import files

ROOT = Path()


def run() -> None:
    """Check the project, since DVC runs this stage before it removes any output, and write `code.yaml`."""
    check_project()
    recall(ROOT)
    lines = [f'{stage}: "{stage_digest(ROOT, stage)}"\n' for stage in stage_names(ROOT)]
    remember(ROOT)
    files.write_text(CODE_DIGESTS, "# Written by `python -m stages.code`.\n" + "".join(lines))


if __name__ == "__main__":
    run_command(run)
