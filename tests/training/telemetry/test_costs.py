import weakref
from pathlib import Path
from typing import Any

import pytest

from slipway.training.telemetry.costs import CostMeter

pytestmark = pytest.mark.unit


def test_the_meter_does_not_keep_the_trainer_after_the_training(tmp_path: Path) -> None:
    class Module:
        def log(self) -> None: ...

    module, meter, unused = Module(), CostMeter(tmp_path), Any
    vars(meter).update(log=module.log, log_dict=module.log)  # as Lightning does
    is_held = weakref.ref(module)
    meter.teardown(unused, unused, "fit")  # type: ignore[arg-type]
    del module
    assert is_held() is None
