"""Projects of the benches: their data, params, stages and service."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from slipway.config.yaml_files import read_yaml
from slipway.config.yaml_text import yaml_text
from slipway.system import files
from tests.project_params import NO_AUGMENTATION, of_kind

ROOT = Path.cwd()


def join_cifar10(source: Path, joined: Path, num_rows: int) -> None:
    """Write the images with a column `part`; every 50th training image is for validation."""
    train = pq.read_table(source / "train.parquet").slice(0, num_rows)
    test = pq.read_table(source / "test.parquet").slice(0, num_rows // 5)
    parts = ["val" if row % 50 == 0 else "train" for row in range(len(train))]
    table = pa.concat_tables([train, test])
    table = table.append_column("part", pa.array(parts + ["test"] * len(test)))
    joined.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, joined)


def write_project_of(task: str, folder: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Write a project folder with the params of this checkout for `task`, and `changes`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    content = of_kind(read_yaml(ROOT / "params.yaml"), task)
    content["data"]["path"] = str(ROOT / content["data"]["path"])
    if task != "image_classification":
        neutral = {k: value for k, value in NO_AUGMENTATION.items() if k in content["augment"]}
        content["augment"].update(neutral)
    files.write_text(folder / "params.yaml", yaml_text(content))
    shutil.copy(ROOT / "dvc.yaml", folder / "dvc.yaml")
    # A machine for tests may have no git.
    files.write_text(folder / ".dvc/config", "[core]\n    no_scm = true\n")
    set_params(folder, changes)


def set_params(folder: Path, changes: dict[str, dict[str, Any]]) -> None:
    """Change keys of a project's params.yaml."""
    content = read_yaml(folder / "params.yaml")
    for section, values in changes.items():
        content[section].update(values)
    files.write_text(folder / "params.yaml", yaml_text(content))


def run_stages(project: Path, stages: Sequence[str]) -> None:
    """Run each stage in a process. Raises RuntimeError with the last lines of a failed stage."""
    for stage in stages:
        done = subprocess.run(
            [sys.executable, "-m", f"slipway.stages.{stage}"],
            cwd=project,
            env=os.environ | {"PYTHONPATH": python_path(), "DS_BUILD_OPS": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        print(done.stdout, flush=True)
        if done.returncode:
            last = [line.strip() for line in done.stdout.splitlines() if line.strip()][-2:]
            raise RuntimeError(f"stage {stage}: {' '.join(last)}")


def python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


@contextmanager
def served(project: Path, settings: dict[str, str]) -> Iterator[str]:
    """Start the project's service, and yield its address once it is ready."""
    import httpx

    from tests.serving.server import free_port

    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "bentoml", "serve", "slipway.serving.service:Slipway"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | settings | {"PYTHONPATH": python_path()}
    with (project / "service.log").open("w") as log:
        process = subprocess.Popen(
            command, cwd=project, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            while True:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{address}/readyz").status_code == 200:
                        break
                if process.poll() is not None:
                    raise RuntimeError((project / "service.log").read_text()[-600:])
                time.sleep(0.2)
            yield address
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(timeout=30)
