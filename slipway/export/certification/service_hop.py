"""The hop over HTTP as a whole: start the service, ask what it runs, send every test row, compare, stop it.

Compared with the very hop that the service runs behind HTTP, so a difference can only come from the
service: decoding, resizing, reading and encoding rows, batching, rounding or labels. On a GPU answers depend a little on the batch they
are computed in, most in fp16; how much was measured with the runtime alone, and that much is allowed here.
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
from slipway.export.certification.http_hop import RowPayload, ServiceClient, ServiceMeasurement
from slipway.export.certification.service_process import running_service
from slipway.system.errors import ParityError, UnavailableError

_NAME = "http"
_NOISE_MARGIN = 2.0  # the noise is measured on some rows and batches, HTTP meets others
_AUTO = Execution(backend="http", provider="auto", precision="auto", variant="auto")


class ServiceHop:
    """Runs the hop with a service that `command` starts; its output goes to `log`."""

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
        """The hop and what was answered; it differs when the service does not start, does not answer, or answers something else."""
        try:
            with (
                running_service(self._command, self._settings, self._log) as url,
                ServiceClient(url, bundle, comparison.rows.classes) as client,
            ):
                choice = client.choice()
                reference = _reference(before, choice.behind)
                measured = client.measure(
                    payloads, len(comparison.rows.ids), params.timing_rounds, choice.actual
                )
        except (UnavailableError, ParityError) as error:
            return failed(_NAME, _AUTO, str(error).rstrip(".")), None
        noise, score_noise = (
            _NOISE_MARGIN * found for found in (reference[1].batch_noise, reference[1].score_noise)
        )
        tolerance = Tolerance(
            max_difference=params.max_difference, noise=noise, score_noise=score_noise
        )
        return _judge(comparison, choice.requested, measured, reference, tolerance)


def _judge(
    comparison: HopComparison,
    requested: Execution,
    measured: ServiceMeasurement,
    reference: tuple[Hop, Measurement],
    tolerance: Tolerance,
) -> Measured:
    """The hop; where rows went out in two forms, the form that is further off."""
    alone = comparison.against(_NAME, requested, measured.alone, reference, tolerance)
    if measured.together is None or alone.status == "differs":
        return alone, measured.alone
    together = comparison.against(_NAME, requested, measured.together, reference, tolerance)
    if together.status == "differs":
        return together.model_copy(
            update={"reason": f"several rows in one request: {together.reason}"}
        ), measured.together
    is_alone = (alone.max_difference or 0.0) >= (together.max_difference or 0.0)
    return (alone, measured.alone) if is_alone else (together, measured.together)


def not_tried(fault: Hop) -> Hop:
    """The hop where an earlier one already forbids a certificate."""
    return not_executed(_NAME, _AUTO, f"{fault.name} comes before and differs")


def _reference(before: list[Measured], behind: Execution) -> tuple[Hop, Measurement]:
    for hop, measured in before:
        if hop.actual == behind and measured is not None:
            return hop, measured
    raise ParityError(
        f"the service runs {behind.backend}/{behind.provider}/{behind.variant}, which is none of the executed hops."
    )
