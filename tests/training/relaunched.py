"""`python -m tests.training.relaunched ENVIRONMENTS`: call `relaunch` in each of these, one after the other, and say where it returns."""

import json
import os
import sys

from slipway.training.distributed.launchers import relaunch

if __name__ == "__main__":
    for environment in json.loads(sys.argv[1]):
        os.environ.clear()
        os.environ.update(environment)
        relaunch("stages.train")
        print("went on")
