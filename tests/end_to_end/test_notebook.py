"""The notebook of docs/tutorials runs in the project that it names, cell by cell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.end_to_end.project import Project, copy_checkout

NOTEBOOK = ROOT / "docs/tutorials/python.ipynb"
# As a kernel does: one namespace for all cells, which may show plots.
KERNEL = """
import json, sys
import matplotlib
matplotlib.use("agg")
names = {}
for number, cell in enumerate(json.load(open(sys.argv[1]))["cells"]):
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
"""


def run(project: Project, notebook: Path) -> subprocess.CompletedProcess[str]:
    variables = project.environment()
    variables["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    return subprocess.run(
        [sys.executable, "-c", KERNEL, notebook],
        cwd=project.path,
        env=variables,
        capture_output=True,
        text=True,
    )


@pytest.mark.nightly(seconds=400)
def test_every_cell_of_the_notebook_runs_after_the_demo(tmp_path: Path) -> None:
    project = copy_checkout(tmp_path / "project")
    project.shell("dvc repro", timeout_s=1200)
    done = run(project, NOTEBOOK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "quality gates: passed" in done.stdout
    assert "faults: {'" in done.stdout
    assert "labels that differ: 0" in done.stdout

    changed = json.loads(
        NOTEBOOK.read_text().replace('model = slipway.load(\\".\\")', "model = 1 / 0")
    )
    (tmp_path / "changed.ipynb").write_text(json.dumps(changed))
    failed = run(project, tmp_path / "changed.ipynb")
    assert failed.returncode == 1
    assert "ZeroDivisionError" in failed.stderr
