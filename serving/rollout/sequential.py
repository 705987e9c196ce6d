"""The law of a rollout: evidence against a candidate that may be looked at after every request, with a stated error.

An event (an error, a slow answer, a wrong one) happens to a request of the candidate or of the stable model. Which of the two a request
goes to is drawn by its id with the probability `share`. If the candidate has the event at most as often as the stable model, each
event is the candidate's with a probability of at most `share`, whatever the rate is and however it changes in time. Against that
stands "r times as often", for the ratios below. The likelihood ratio of one event is r / (1 + share (r - 1)) if it is the candidate's
and 1 / (1 + share (r - 1)) if not. Its expectation is at most 1, so the product over all events is a nonnegative supermartingale, and so is
the mean over the ratios (Robbins 1970, "Statistical Methods Related to the Law of the Iterated Logarithm"; for counts in groups Lindon
and Malek 2022, "Anytime-Valid Inference for Multinomial Count Data"). By Ville's inequality it ever reaches 1/alpha with a probability
of at most alpha.

Counts for each share are all it needs. They are sums, so the counts of several workers add up, exactly and in any order. The same law
judges one rate alone: of the requests that both models answer at most `share` may differ, and the candidate's events are those that do.
"""

import math
from collections.abc import Mapping

ALPHA = 0.01  # probability that a candidate no worse than the stable model is ever rolled back, over all tests of a rollout together
RATIOS = (
    1.25,
    1.5,
    2.0,
    3.0,
    5.0,
    10.0,
    30.0,
    100.0,
)  # guess: from what hardly matters to what nobody overlooks
TESTS = ("errors", "slow", "disagreement", "quality")
LOG_THRESHOLD = math.log(len(TESTS) / ALPHA)  # Bonferroni: each test has its part of the error

EventCounts = Mapping[
    float, tuple[int, int]
]  # by share: events of the candidate, events of the stable model


def log_evidence(counts: EventCounts) -> float:
    """Natural logarithm of the evidence that the candidate has the event more often than `share` allows; 0 where there are no events.

    A share is above 0 and at most 1; at 1 all events are the candidate's, and say nothing.
    """
    return _log_mean([_log_likelihood(counts, ratio) for ratio in RATIOS])


def _log_likelihood(counts: EventCounts, ratio: float) -> float:
    return sum(
        of_candidate * math.log(ratio)
        - (of_candidate + of_stable) * math.log1p(share * (ratio - 1))
        for share, (of_candidate, of_stable) in counts.items()
    )


def _log_mean(logarithms: list[float]) -> float:
    largest = max(logarithms)
    return largest + math.log(sum(math.exp(one - largest) for one in logarithms) / len(logarithms))
