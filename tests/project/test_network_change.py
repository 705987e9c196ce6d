"""`slipway run train.network=NAME` writes the recipe that `slipway init` proposes for NAME."""

from collections.abc import Callable
from pathlib import Path

import pytest

from slipway.config.edit import read_text
from slipway.config.params import mistakes_in, parse_params, recipe_remedy, value_at
from slipway.planning.search_space import space_mistakes
from slipway.project.creation import params_file
from slipway.project.inspection import inspect
from slipway.project.network_change import with_assignments
from slipway.project.pretrained import Weights, WeightSearch
from slipway.project.proposal import propose
from slipway.system.errors import ParamsError
from tests.project.shapes import class_folders, messages, photographs, wine

OWN = "nets:Net"
ENCODER = Weights("encoder", "models/bert", "as you chose")
KINDS: dict[str, tuple[Callable[[Path], Path], str | None, list[str]]] = {
    "digits": (class_folders, None, ["small_resnet", "timm/resnet18", OWN]),
    "photographs": (photographs, None, ["small_resnet", "timm/resnet18", OWN]),
    "table of classes": (wine, "cultivar", ["tabm", "lightgbm", OWN]),
    "table of numbers": (wine, "proline", ["tabm", "lightgbm", OWN]),
    "texts": (messages, None, ["hashed_ngrams", "small_transformer", OWN, "encoder"]),
}
PAIRS = [
    (kind, former, network)
    for kind, (_, _, networks) in KINDS.items()
    for former in networks
    for network in networks
    if former != network
]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def params_of(kind: str, network: str | None) -> str:
    """Return the params.yaml that `slipway init --network NETWORK` writes."""
    make, target, _ = KINDS[kind]
    task = "table_classification" if target == "cultivar" else None
    weights = ENCODER if network == "encoder" else None
    data = Path("data").absolute()
    data.mkdir(exist_ok=True)
    proposal = propose(
        inspect(make(data)), task, target, network=network, search=WeightSearch(weights)
    )
    return params_file(Path().absolute(), proposal)


def switched(text: str, network: str, **others: object) -> str:
    given = {"train.network": network, **others}
    if network == "encoder":
        given["train.pretrained"] = "models/bert"
    return with_assignments(text, given).text


@pytest.mark.parametrize(("kind", "former", "network"), PAIRS)
def test_a_new_network_leaves_the_lines_that_init_writes_for_it(
    kind: str, former: str, network: str
) -> None:
    after = switched(params_of(kind, former), network)
    assert sorted(after.splitlines()) == sorted(params_of(kind, network).splitlines())
    content = read_text(after)
    search = parse_params(content).search
    assert search is not None
    assert network == OWN or not space_mistakes(content, search)


def test_a_free_proposal_gets_the_recipe_of_another_network_without_stale_comments() -> None:
    after = switched(params_of("table of classes", None), "lightgbm")
    assert sorted(after.splitlines()) == sorted(
        params_of("table of classes", "lightgbm").splitlines()
    )


def test_two_networks_in_a_row_end_with_the_recipe_of_the_last() -> None:
    text = params_of("table of classes", "tabm")
    back = switched(switched(text, "lightgbm"), "tabm")
    assert sorted(back.splitlines()) == sorted(text.splitlines())


def test_the_users_comments_and_other_values_survive_a_new_network() -> None:
    text = params_of("table of classes", "tabm")
    text = text.replace(
        "  epochs: ", "  # short, for the demo\n  loss: cross_entropy # mine\n  epochs: "
    )
    text = text.replace("# some tens of steps in an epoch", "# fits my laptop")
    after = switched(text.replace("train:\n", "train: # the model\n"), "lightgbm")
    assert "train: # the model\n" in after
    assert "  # short, for the demo\n  loss: cross_entropy # mine\n  epochs: 2000 # rounds" in after
    assert "batch_size" not in after, "its line goes with its comment"


def test_a_users_comment_on_a_changed_value_stays_in_place_of_the_reason() -> None:
    text = params_of("table of classes", "tabm").replace("# usual for this network", "# tuned")
    assert "  learning_rate: 0.05 # tuned\n" in switched(text, "lightgbm")


def test_values_given_with_the_network_win_over_its_recipe_and_move_the_search() -> None:
    text = params_of("table of classes", "tabm")
    given = {"train.learning_rate": 0.02, "train.network_arguments.num_leaves": 12}
    content = read_text(switched(text, "lightgbm", **given))
    assert {key: value_at(content, key) for key in given} == given
    space = content["search"]["space"]
    assert space["train.learning_rate"] == {"log_range": [0.005, 0.08]}
    assert 12 in space["train.network_arguments.num_leaves"]["choice"]


def test_lines_name_what_is_new_removed_and_kept() -> None:
    text = params_of("photographs", "small_resnet").replace(
        "image_size_px: 64", "image_size_px: 48"
    )
    given = {"train.network": "timm/resnet18", "train.pretrained": "hub", "seed": 3}
    lines = with_assignments(text, given).lines
    assert lines[0] == "params.yaml: train.network: timm/resnet18 (was small_resnet)"
    assert "train.freeze_epochs" in lines[1]
    assert lines[2].startswith("  removed with small_resnet: augment.")
    assert lines[2].endswith(", train.network_arguments {width: 32}")
    assert lines[3] == "  kept, because you chose them: precompute.image_size_px 48"
    assert lines[-2:] == ["params.yaml: train.pretrained: hub", "params.yaml: seed: 3"]


def test_settings_that_the_new_network_refuses_go_with_the_former_one() -> None:
    text = params_of("table of classes", "tabm")
    text = text.replace("  epochs:", "  strategy: ddp\n  loggers: [mlflow]\n  epochs:")
    text += "prune: {kind: magnitude}\nexport:\n  variants: [fp32, pruned]\n"
    change = with_assignments(text, {"train.network": "lightgbm"})
    removed = next(line for line in change.lines if "removed with tabm" in line)
    assert {"train.strategy", "train.loggers", "prune.kind"} <= set(removed.split())
    assert not mistakes_in(read_text(change.text))


def test_the_networks_own_settings_stay_if_it_is_named_again() -> None:
    text = params_of("table of classes", "tabm").replace("epochs: 100", "epochs: 7")
    assert switched(text, "tabm") == text


def test_a_mistake_of_the_user_is_not_removed_with_the_former_network() -> None:
    text = params_of("table of classes", "tabm").replace("  epochs:", "  loss: hubber\n  epochs:")
    with pytest.raises(ParamsError, match=r"train\.loss"):
        switched(text, "lightgbm")


def test_a_network_written_by_hand_is_refused_with_the_command_that_brings_its_recipe() -> None:
    text = params_of("table of classes", "tabm").replace("network: tabm", "network: lightgbm")
    with pytest.raises(ParamsError, match=r"`slipway run train\.network=lightgbm` puts its own"):
        parse_params(read_text(text))
    after = switched(text.replace("  epochs:", "  strategy: ddp\n  epochs:"), "lightgbm")
    assert value_at(read_text(after), "train.epochs") == 2000
    assert not mistakes_in(read_text(after))


def test_a_plain_mistake_gets_no_advice_on_networks() -> None:
    content = read_text(params_of("table of classes", "tabm"))
    content["train"]["learning_rate"] = -1
    assert recipe_remedy(content) == ""


@pytest.mark.parametrize(
    ("kind", "network", "part"),
    [
        ("table of classes", "timm/resnet18", "takes 'tabm', 'lightgbm' or your own"),
        ("table of classes", "lightgmb", r"did you mean 'lightgbm'\?"),
        ("digits", "lightgbm", "takes 'small_resnet', 'timm/NAME' or your own"),
        ("texts", "tabm", "takes 'hashed_ngrams', 'small_transformer', 'encoder' or your own"),
    ],
)
def test_a_network_of_another_kind_of_data_is_refused_with_those_that_fit(
    kind: str, network: str, part: str
) -> None:
    with pytest.raises(ParamsError, match=part):
        switched(params_of(kind, None), network)
    with pytest.raises(ParamsError, match=f"--network is.*{part}"):
        params_of(kind, network)


def test_an_encoder_without_a_folder_is_refused_with_the_command_that_names_one() -> None:
    with pytest.raises(ParamsError, match=r"train\.network=encoder train\.pretrained=FOLDER"):
        with_assignments(params_of("texts", None), {"train.network": "encoder"})


def test_data_that_cannot_be_read_gives_a_recipe_of_default_lengths() -> None:
    text = params_of("table of classes", "tabm").replace("path: ", "path: gone/")
    change = with_assignments(text, {"train.network": "lightgbm"})
    assert parse_params(read_text(change.text)).train.epochs == 2000
    assert any("is the default: 'gone/" in line for line in change.lines)
