"""Generated image files, valid or not: the service answers each with 200 or a refusal."""

import httpx
import pytest

from slipway.serving.worker import ModelWorker
from tests.inputs.image_files import FAMILIES
from tests.inputs.verdicts import READ, verdict
from tests.serving.conftest import MakeSettings
from tests.serving.in_process import error_of, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # Pillow warns of damaged tags


@pytest.mark.process
@pytest.mark.parametrize("family", FAMILIES)
def test_service_gives_each_generated_image_file_the_verdict_of_clean(
    make_settings: MakeSettings, family: str
) -> None:
    files = list(FAMILIES[family]())

    async def work(client: httpx.AsyncClient, worker: ModelWorker) -> None:
        for name, payload in files[:: len(files) // 60]:
            headers = {"content-type": "image/png"}
            answer = await client.post("/predict", content=payload, headers=headers)
            found = READ if answer.status_code == 200 else error_of(answer)["code"]
            assert found == verdict(name, payload), name

    run(make_settings(), work)
