"""Writes a project's certificate as a table for the docs: one line for each executed hop.

`python -m bench.certificate PROJECT NAME TITLE` reads the certificate that `slipway verify` wrote
in PROJECT and writes bench/results/NAME.md.
"""

import sys
from pathlib import Path

from bench.conditions import conditions
from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.certificate import read_certificate
from slipway.export.certification.verdict import hop_table
from slipway.system import files

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "onnxruntime-gpu", "bentoml", "tokenizers")


def main() -> None:
    """Write the table of the certificate."""
    project, name, title = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    certificate = read_certificate(project / "artifacts/certificate.json")
    bundle = load_bundle(project / "artifacts/bundle")
    table = hop_table(certificate.hops, bundle)
    text = f"# {title}\n\nStatus: {certificate.status}.\n\n```\n{table}\n```\n\n"
    files.write_text(RESULTS / f"{name}.md", f"{text}{conditions(*PACKAGES)}\n")
    print(text)


if __name__ == "__main__":
    main()
