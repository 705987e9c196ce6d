"""`python -m tests.training.relaunched ENVIRONMENTS`: calls `relaunch` in each environment.

Prints the environments in which the call returns.
"""

import json
import os
import sys

from slipway.training.distributed.launchers import relaunch

if __name__ == "__main__":
    for environment in json.loads(sys.argv[1]):
        os.environ.clear()
        os.environ.update(environment)
        relaunch("slipway.stages.train")
        print("went on")
