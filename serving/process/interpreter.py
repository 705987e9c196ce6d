"""How Python itself works in a worker: its search for reference cycles, and how long a thread may keep the others waiting.

*Cycles.* A full search walks over every object there is: the modules and the model, some hundred thousand, take 50 to 100 ms in which
nobody is answered. What is there once the model is loaded stays, so it is put aside (`gc.freeze`); and requests leave next to no
cycles, so the rest is searched less often than the interpreter would.

*Turns.* One thread at a time has the interpreter, and gives it up when another has waited for 5 ms. The event loop answers a request in a
fraction of that, and would wait so long again and again while a model is loaded or a window judged beside it.
"""

import gc
import sys

_YOUNG, _MIDDLE, _OLD = (
    20_000,
    20,
    20,
)  # net allocations between two searches of the youngest; searches of one between two of the next
TURN_S = 0.0005


def put_aside_what_stays() -> None:
    """Search once, then leave alone all that is there. Takes about 0.1 s: before the first request, not between two."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG, _MIDDLE, _OLD)


def take_short_turns() -> None:
    """No thread keeps the event loop waiting for long, unless it computes outside of Python without saying so."""
    sys.setswitchinterval(TURN_S)
