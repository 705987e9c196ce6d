"""Sequential test of a rollout: evidence against a candidate that is valid after every request.

An event (an error, a slow answer, a wrong answer) happens to a request of the candidate or of the
stable model. The request id draws the candidate with probability `fraction`. Null hypothesis: the
candidate has the event at most as often as the stable model. Then each event is the candidate's
with probability at most `fraction`, whatever the event's rate and however it changes over time.
Alternative: "r times as often", for each r of RATIOS. The likelihood ratio of one event is
r / (1 + fraction (r - 1)) for the candidate and 1 / (1 + fraction (r - 1)) for the stable model.
Its expectation is at most 1, so the product over all events is a nonnegative supermartingale, and
so is the mean over the ratios (Robbins 1970, "Statistical Methods Related to the Law of the
Iterated Logarithm"; for counts in groups Lindon and Malek 2022, "Anytime-Valid Inference for
Multinomial Count Data"). By Ville's inequality it ever reaches 1/alpha with probability at
most alpha.

The test needs only counts per fraction. Counts are sums, so those of several workers add up exactly
and in any order. The same test judges a single rate: of the requests that both models answer, at
most `fraction` may differ, and the events of the candidate are the requests that do.
"""

import math
from collections.abc import Mapping

# Probability that a rollout rolls back a candidate no worse than the stable model, by any test.
ALPHA = 0.01
# Guess: from a difference that hardly matters to one that nobody overlooks.
RATIOS = (1.25, 1.5, 2.0, 3.0, 5.0, 10.0, 30.0, 100.0)
TESTS = ("errors", "slow", "disagreement", "quality")
LOG_THRESHOLD = math.log(len(TESTS) / ALPHA)  # Bonferroni correction for the number of tests

# For each fraction: numbers of events of the candidate and of the stable model.
EventCounts = Mapping[float, tuple[int, int]]


def log_evidence(counts: EventCounts) -> float:
    """Return the natural logarithm of the evidence that the candidate's event rate is too high.

    Returns 0 if there are no events. A fraction is above 0 and at most 1; at fraction 1 every event
    is the candidate's and carries no evidence.
    """
    return _log_mean([_log_likelihood(counts, ratio) for ratio in RATIOS])


def _log_likelihood(counts: EventCounts, ratio: float) -> float:
    return sum(
        of_candidate * math.log(ratio)
        - (of_candidate + of_stable) * math.log1p(fraction * (ratio - 1))
        for fraction, (of_candidate, of_stable) in counts.items()
    )


def _log_mean(logarithms: list[float]) -> float:
    largest = max(logarithms)
    return largest + math.log(sum(math.exp(one - largest) for one in logarithms) / len(logarithms))
