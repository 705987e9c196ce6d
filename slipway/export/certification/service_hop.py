"""Runs the HTTP hop: starts the service, sends every test row, compares the answers, stops it.

The reference is the hop that the service runs behind HTTP, so a difference can only come from the
service: decoding, resizing, reading and encoding rows, batching, rounding or labels. On a GPU an
answer depends slightly on its batch, most of all in fp16. That noise was measured with the runtime
alone and is allowed here.
"""

from collections.abc import Iterator
from pathlib import Path

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution, Hop
from slipway.config.sections import VerifyParams
from slipway.export.certification.comparison import (
    HopComparison,
    Measurement,
    Tolerance,
    failed,
    not_executed,
)
from slipway.export.certification.hops import Measured
from slipway.export.certification.http_hop import RowPayload, ServiceClient
from slipway.export.certification.service_process import running_service
from slipway.system.errors import ParityError, UnavailableError

_NAME = "http"
_NOISE_MARGIN = 2.0  # noise is measured on some rows and batches; HTTP meets others
_AUTO = Execution(backend="http", provider="auto", precision="auto", variant="auto")


class ServiceHop:
    """Runs the HTTP hop with a service that `command` starts; its output goes to `log`."""

    def __init__(self, command: list[str], settings: dict[str, str], log: Path) -> None:
        self._command = command
        self._settings = settings
        self._log = log

    def run(
        self,
        comparison: HopComparison,
        bundle: LoadedBundle,
        before: list[Measured],
        payloads: Iterator[RowPayload],
        params: VerifyParams,
    ) -> Measured:
        """Return the hop and its answers.

        Its status is "differs" if the service does not start, does not answer, or answers
        differently. Rows of a table are sent in two ways; the one with the larger difference
        counts.
        """
        try:
            with (
                running_service(self._command, self._settings, self._log) as url,
                ServiceClient(url, bundle, comparison.rows.classes) as client,
            ):
                choice = client.choice()
                reference = _reference(before, choice.behind)
                single, grouped = client.measure(
                    payloads, len(comparison.rows.ids), params.timing_rounds, choice.actual
                )
        except (UnavailableError, ParityError) as error:
            return failed(_NAME, _AUTO, str(error).rstrip(".")), None

        tolerance = Tolerance(
            max_difference=params.max_difference,
            noise=_NOISE_MARGIN * reference[1].batch_noise,
            score_noise=_NOISE_MARGIN * reference[1].score_noise,
        )
        hop = comparison.against(_NAME, choice.requested, single, reference, tolerance)
        if grouped is None or hop.status == "differs":
            return hop, single
        grouped_hop = comparison.against(_NAME, choice.requested, grouped, reference, tolerance)
        if grouped_hop.status == "differs":
            reason = f"several rows in one request: {grouped_hop.reason}"
            return grouped_hop.model_copy(update={"reason": reason}), grouped
        if (hop.max_difference or 0.0) >= (grouped_hop.max_difference or 0.0):
            return hop, single
        return grouped_hop, grouped


def not_tried(fault: Hop) -> Hop:
    """Return the unexecuted HTTP hop, because the earlier hop `fault` differs."""
    return not_executed(_NAME, _AUTO, f"not tried, because the earlier hop {fault.name} differs")


def _reference(before: list[Measured], behind: Execution) -> tuple[Hop, Measurement]:
    for hop, measured in before:
        if hop.actual == behind and measured is not None:
            return hop, measured
    raise ParityError(
        f"the service runs {behind.backend}/{behind.provider}/{behind.variant}, "
        "which is not among the executed hops."
    )
