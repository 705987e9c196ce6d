"""code: writes for each stage a digest of the code that it reaches, and one of its params.

Both are among the params of the other stages, so DVC reruns a stage when its code changes, or a
value that it reads. Values that params.yaml leaves out are those of the code.
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
    from slipway.config.params import read_content, resolved
    from slipway.config.seals import stage_entry, stage_params
    from slipway.config.stage_graph import read_pipeline
    from slipway.kinds.code_digest import recall, remember, stage_files, stage_names
    from slipway.preflight.project import check_project

    check_project()
    recall(ROOT)
    values, pipeline = resolved(read_content()), read_pipeline()
    lines = ["# Written by `python -m slipway.stages.code`.\n"]
    for stage in stage_names(ROOT):
        entry = stage_entry(stage_files(ROOT, stage), stage_params(values, pipeline, stage))
        lines += [f"{stage}:\n", *(f'  {name}: "{digest}"\n' for name, digest in entry.items())]
    remember(ROOT)
    return "".join(lines)


if __name__ == "__main__":
    run_command(run)
