"""`python -m slipway.planning.plan`: what the training of params.yaml takes, before anything is spent.

Parameters, memory on each device for every strategy and precision, steps, disk and, after a few real steps, time; every mismatch
with this machine at once, and exit code 1 where there is one. After a training it says how far it was off.
"""

import argparse

from slipway.config.command import run_stage
from slipway.config.params import Params
from slipway.planning.plan_text import compare, describe
from slipway.planning.planning import ResourcePlan, make_plan
from slipway.system.broken_pipe import quiet_when_unread
from slipway.system.errors import UnavailableError
from slipway.training.checkpoints.fingerprint import take_fingerprint
from slipway.training.distributed.strategies import this_host
from slipway.training.job import PROJECT_PATHS, Paths
from slipway.training.telemetry.costs import read_costs


def _comparison(plan: ResourcePlan, params: Params, paths: Paths) -> str | None:
    costs = read_costs(paths.costs)
    if (
        costs is None
        or plan.placement is None
        or plan.data is None
        or plan.network is None
        or plan.memory is None
    ):
        return None
    run = take_fingerprint(
        params.seed, params.train, plan.placement, paths.packed, paths.augmented, paths.root
    ).name
    if costs.run != run:
        return f"note      {paths.costs} is of the training {costs.run}, not of these params, data and code ({run}): nothing to compare"
    return compare(plan.network, plan.memory, plan.disk, plan.seconds, costs)


@quiet_when_unread()
def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m slipway.planning.plan", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="bound of the real steps that are timed; 0 for none",
    )
    arguments = parser.parse_args()

    def run(params: Params) -> None:
        plan = make_plan(params, PROJECT_PATHS, this_host(), arguments.seconds)
        print(
            "\n".join(
                filter(None, [describe(plan, params), _comparison(plan, params, PROJECT_PATHS)])
            ),
            flush=True,
        )
        if problems := plan.findings.mismatches:
            raise UnavailableError(
                "this cannot work:\n" + "\n".join(f"  {problem}" for problem in problems)
            )

    run_stage(run)


if __name__ == "__main__":
    main()
