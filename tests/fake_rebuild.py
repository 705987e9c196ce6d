"""The process `slipway.runtimes.rebuild` with a simulated GPU.

Usage: python -m tests.fake_rebuild BUNDLE ENGINE REBUILT
"""

import sys

from slipway.runtimes.rebuild import main
from tests import fake_tensorrt

if __name__ == "__main__":
    fake_tensorrt.pretend(setattr)
    sys.exit(main(sys.argv[1:], fake_tensorrt.__name__))
