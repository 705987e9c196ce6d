"""The verbs of `slipway`, in the order of a first day with it. At most 25."""

from collections.abc import Mapping

from slipway.cli.lazy import Verb

VERBS: Mapping[str, Verb] = {
    "check": Verb("slipway.cli.params:check", "check params.yaml, the data and this machine"),
    "set": Verb("slipway.cli.params:set_values", "change values of params.yaml"),
    "plan": Verb("slipway.planning.plan:main", "predict memory, disk and time of the training"),
    "version": Verb("slipway.cli.about:version", "print the version", extra=""),
}
