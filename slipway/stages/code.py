"""code: writes for each stage a digest of the code that the stage reaches.

The digests are among the params of the other stages, so DVC reruns a stage when its code changes.
"""

from pathlib import Path

from slipway.kinds.code_stamp import code_stamp, remember_text, remembered
from slipway.system import files
from slipway.system.command_run import run_command

ROOT = Path()


def run() -> None:
    """Check the project, then write `code.yaml`.

    The check is here because DVC has not removed any output yet. If neither params.yaml nor code
    changed since the last run, the same text is written without a check.
    """
    stamp = code_stamp(ROOT)
    text = remembered(ROOT, stamp)
    if text is None:
        text = _digests()
        remember_text(ROOT, stamp, text)
    files.write_text(ROOT / "code.yaml", text)


def _digests() -> str:
    # Imported here because they take a second.
    from slipway.kinds.code_digest import recall, remember, stage_digest, stage_names
    from slipway.preflight.project import check_project

    check_project()
    recall(ROOT)
    lines = [f'{stage}: "{stage_digest(ROOT, stage)}"\n' for stage in stage_names(ROOT)]
    remember(ROOT)
    return "# Written by `python -m slipway.stages.code`.\n" + "".join(lines)


if __name__ == "__main__":
    run_command(run)
