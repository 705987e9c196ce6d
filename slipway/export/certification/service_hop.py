"""Runs the hops `http` and `grpc`: starts the service and compares its predictions.

Every test row is sent, and the service is stopped at the end. The reference is the hop of the
runtime that the service uses, so a difference can only come from the service: decoding, resizing,
reading and encoding rows, batching, rounding or labels. On a GPU a prediction depends slightly on
its batch, most of all in fp16. That noise was measured with the runtime only and is allowed here.
Without the packages of gRPC the hop `grpc` is not executed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

from slipway.artifacts.bundle import LoadedBundle
from slipway.artifacts.certificate import Execution, Hop
from slipway.config.sections import VerifyParams
from slipway.export.certification.comparison import HopComparison, Tolerance, failed, not_executed
from slipway.export.certification.grpc_hop import GrpcClient, why_no_grpc
from slipway.export.certification.hops import Measured
from slipway.export.certification.http_hop import RowPayload, ServiceClient
from slipway.export.certification.measurement import Measurement
from slipway.export.certification.service_process import free_port, running_service
from slipway.system.errors import ParityError, UnavailableError

_NOISE_MARGIN = 2.0  # noise is measured on some rows and batches; HTTP meets others
Backend = Literal["http", "grpc"]
MakePayloads = Callable[[], Iterator[RowPayload]]


class ServiceHop:
    """Runs the hops with a service that `command` starts; its output goes to `log`.

    `no_grpc` is the reason if that service has no gRPC.
    """

    def __init__(
        self,
        command: list[str],
        settings: dict[str, str],
        log: Path,
        no_grpc: str | None = None,
    ) -> None:
        self._command = command
        self._settings = settings
        self._log = log
        self._no_grpc = no_grpc or why_no_grpc()

    def run(
        self,
        comparison: HopComparison,
        bundle: LoadedBundle,
        before: list[Measured],
        payloads: MakePayloads,
        params: VerifyParams,
    ) -> list[Measured]:
        """Return the hops `http` and `grpc` with their predictions, or the reason for having none.

        The status is "differs" if the service does not start, does not respond, or predicts
        differently. Rows of a table are sent in two ways; the one with the larger difference
        counts.
        """
        classes, port = comparison.rows.classes, free_port()
        settings = self._settings
        if self._no_grpc is None:
            settings = settings | {"SLIPWAY_GRPC_PORT": str(port)}
        try:
            with running_service(self._command, settings, self._log) as url:
                with ServiceClient(url, bundle, classes) as client:
                    over_http = _compare(comparison, client, before, payloads(), params)
                if self._no_grpc is not None:
                    return [over_http, (_not_executed("grpc", self._no_grpc), None)]
                if over_http[0].status == "differs":
                    return [over_http, (not_tried(over_http[0])[1], None)]
                with GrpcClient(url, f"127.0.0.1:{port}", bundle, classes) as client:
                    return [over_http, _compare(comparison, client, before, payloads(), params)]
        except UnavailableError as error:
            fault = failed("http", _auto("http"), str(error).rstrip("."))
            return [(fault, None), (not_tried(fault)[1], None)]


def not_tried(fault: Hop) -> list[Hop]:
    """Return both hops with the status `not_executed`, because the earlier hop `fault` differs."""
    reason = f"not tried, because the earlier hop {fault.name} differs"
    return [_not_executed("http", reason), _not_executed("grpc", reason)]


def _compare(
    comparison: HopComparison,
    client: ServiceClient,
    before: list[Measured],
    payloads: Iterator[RowPayload],
    params: VerifyParams,
) -> Measured:
    name, num_rows = client.backend, len(comparison.rows.ids)
    try:
        choice = client.choice()
        reference = _reference(before, choice.behind)
        single, grouped = client.measure(payloads, num_rows, params.timing_rounds, choice.actual)
    except ParityError as error:
        return failed(name, _auto(name), str(error).rstrip(".")), None
    tolerance = Tolerance(
        max_difference=params.max_difference,
        noise=_NOISE_MARGIN * reference[1].batch_noise,
        score_noise=_NOISE_MARGIN * reference[1].score_noise,
    )
    hop = comparison.against(name, choice.requested, single, reference, tolerance)
    if grouped is None or hop.status == "differs":
        return hop, single
    grouped_hop = comparison.against(name, choice.requested, grouped, reference, tolerance)
    if grouped_hop.status == "differs":
        reason = f"several rows in one request: {grouped_hop.reason}"
        return grouped_hop.model_copy(update={"reason": reason}), grouped
    if (hop.max_difference or 0.0) >= (grouped_hop.max_difference or 0.0):
        return hop, single
    return grouped_hop, grouped


def _auto(name: Backend) -> Execution:
    return Execution(backend=name, provider="auto", precision="auto", variant="auto")


def _not_executed(name: Backend, reason: str) -> Hop:
    return not_executed(name, _auto(name), reason)


def _reference(before: list[Measured], behind: Execution) -> tuple[Hop, Measurement]:
    for hop, measured in before:
        if hop.actual == behind and measured is not None:
            return hop, measured
    raise ParityError(
        f"the service runs {behind.backend}/{behind.provider}/{behind.variant}, "
        "which is not among the executed hops."
    )
