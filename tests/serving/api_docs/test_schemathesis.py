"""The service conforms to `/docs.json` by the checks of Schemathesis, an independent tester.

All its checks are on: statuses, schemas and headers of the document, valid data is accepted,
invalid data and unknown methods are refused, and no answer without a key.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipway.serving.auth.keys import add_key
from tests import plain_http
from tests.serving.bundles import row_classifier
from tests.serving.ready_service import ready_service
from tests.serving.server import ROOT

# By default it accepts no 413 as the refusal of invalid data: of a list that is too long.
CONFIG = """\
auth.openapi.bearer.bearer = "{key}"
[checks]
negative_data_rejection.expected-statuses = [
  "400", "401", "403", "404", "405", "409", "411", "413", "415", "422", "429", "5xx",
]
"""


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "num_examples"),
    [
        pytest.param("images", 5, marks=pytest.mark.nightly(seconds=21)),
        ("rows", 2),
        pytest.param("images", 200, marks=pytest.mark.nightly(seconds=120)),
        pytest.param("rows", 200, marks=pytest.mark.nightly(seconds=120)),
    ],
)
def test_schemathesis_finds_no_fault_in_the_service_or_its_document(
    tmp_path: Path, kind: str, num_examples: int
) -> None:
    key = add_key(tmp_path / "keys", "ops", "operator", None)
    (tmp_path / "schemathesis.toml").write_text(CONFIG.format(key=key))
    graph = row_classifier() if kind == "rows" else None
    with ready_service(tmp_path, graph, keys=tmp_path / "keys") as server:
        document = plain_http.get(
            server.url + "/docs.json", headers={"authorization": f"Bearer {key}"}
        )
        (tmp_path / "docs.json").write_bytes(document.content)
        run = subprocess.run(
            [
                Path(sys.executable).with_name("schemathesis"), "--config-file",
                "schemathesis.toml", "run", "docs.json", "--url", server.url, "--checks", "all",
                "--seed", "1", "--warnings", "off",
                "--max-examples", str(num_examples), "--phases", "examples,coverage,fuzzing",
                "--no-shrink", "--continue-on-failure",
            ],
            cwd=tmp_path,
            env=os.environ | {
                "SCHEMATHESIS_HOOKS": "tests.serving.api_docs.schemathesis_hooks",
                "PYTHONPATH": str(ROOT), "SLIPWAY_TEST_KIND": kind,
            },
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )  # fmt: skip
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-5000:]
    assert "Tested: 33" in run.stdout
