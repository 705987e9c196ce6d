"""The verbs of `slipway`, in the order of a first day with it. At most 25."""

from collections.abc import Mapping

from slipway.cli.lazy import Verb

VERBS: Mapping[str, Verb] = {
    "plan": Verb("slipway.planning.plan:main", "predict memory, disk and time of the training"),
    "version": Verb("slipway.cli.about:version", "print the version", extra=""),
}
