"""The params, questions and warnings that `slipway init` proposes for many data sets."""

import json
import shutil
import zipfile
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from slipway.config.params import filled, parse_params
from slipway.data.engine.label_sets import label_counts
from slipway.project.inspection import inspect
from slipway.project.pretrained import Weights, WeightSearch
from slipway.project.proposal import ProjectProposal, propose
from slipway.project.recipe import Machine
from slipway.project.table_sample import encoding_of
from slipway.system.errors import DataError, ParamsError
from tests.data.raw_files import cleaned
from tests.project.shapes import SHAPES, class_folders, wine, wine_rows
from tests.sentences import sentences

pytestmark = pytest.mark.unit
LAPTOP = Machine(cores=2, has_gpu=False, has_amx=False)


def table(
    folder: Path, text: str, task: str | None = None, target: str | None = None
) -> ProjectProposal:
    """Return the proposal for a CSV of this text."""
    path = folder / "table.csv"
    path.write_text(text)
    return propose(inspect(path), task, target, machine=LAPTOP)


@pytest.mark.parametrize("name", SHAPES)
def test_init_proposes_the_right_params_for_data_sets_of_many_shapes(
    name: str, tmp_path: Path
) -> None:
    shape = SHAPES[name]
    proposal = propose(inspect(shape.make(tmp_path)), shape.task, shape.target, machine=LAPTOP)
    assert not proposal.questions
    shape.check(proposal.params)
    parse_params(dict(proposal.params))


def test_init_proposes_trees_only_if_tabm_would_take_too_long(tmp_path: Path) -> None:
    summary = inspect(wine(tmp_path))
    small, large = (
        propose(replace(summary, num_rows=rows), "table_regression", "proline", machine=LAPTOP)
        for rows in (summary.num_rows, 5_000_000)
    )
    assert small.value("train.network") == "tabm"
    assert "as good as lightgbm" in small.reasons["train.network"]
    assert large.value("train.network") == "lightgbm"
    assert "has time for only" in large.reasons["train.network"]
    assert parse_params(dict(large.params)).export.variants == ["fp32"]


# Questions and refusals ---------------------------------------------------------------------------


def test_init_asks_for_an_unnamed_target_with_the_last_column_first() -> None:
    (question,) = propose(inspect(wine(Path())), machine=LAPTOP).questions
    assert question.option == "--target"
    assert question.candidates[0] == list(wine_rows()[0])[-1]
    assert "cultivar" in question.candidates


def test_init_asks_for_the_task_if_the_target_has_few_whole_numbers() -> None:
    (question,) = propose(inspect(wine(Path())), target="cultivar", machine=LAPTOP).questions
    assert question.option == "--task"
    assert question.candidates == ("table_classification", "table_regression")


def test_error_for_an_unknown_target_names_the_most_similar_column() -> None:
    with pytest.raises(ParamsError, match="did you mean 'cultivar'"):
        propose(inspect(wine(Path())), target="Cultivar", machine=LAPTOP)


def test_a_task_for_a_different_kind_of_input_is_refused() -> None:
    expected = "expected table_classification, table_multilabel or table_regression"
    with pytest.raises(ParamsError, match=expected):
        propose(inspect(wine(Path())), "image_classification", "cultivar", machine=LAPTOP)


@pytest.mark.parametrize("target", [None, "label"])
def test_a_table_of_texts_and_classes_becomes_a_task_of_texts(
    tmp_path: Path, target: str | None
) -> None:
    params = table(tmp_path, _texts(99), target=target).params
    assert (params["data"]["task"], params["data"]["text_columns"]) == (
        "text_classification",
        ["text"],
    )
    assert params["precompute"]["max_text_bytes"] == 64
    assert params["train"]["network"] == "hashed_ngrams"
    assert "augment" not in params


@pytest.mark.parametrize("header", ["title,label", "title,kind"])
@pytest.mark.parametrize("words", ["red shoe", "\u7ea2\u8272\u978b\u5b50"])
def test_short_texts_are_the_input_if_a_table_would_have_none(
    tmp_path: Path, header: str, words: str
) -> None:
    lines = [f"{words} {n},{'old' if n % 3 else 'new'}" for n in range(60)]
    data = table(tmp_path, "\n".join([header, *lines])).params["data"]
    assert (data["task"], data["text_columns"]) == ("text_classification", ["title"])
    assert data["target_column"] == header.partition(",")[2]


@pytest.mark.parametrize(
    ("value", "others"), [("red shoe {}", ",{}"), ("id {}", ",{}"), ("12 March {}", ",{}")]
)
def test_codes_and_titles_beside_other_columns_remain_a_table(
    tmp_path: Path, value: str, others: str
) -> None:
    lines = [
        f"{value.format(n)},{'old' if n % 3 else 'new'}{others.format(n % 7)}" for n in range(60)
    ]
    text = "\n".join(["title,label" + others.format("size"), *lines])
    assert table(tmp_path, text).params["data"]["task"] == "table_classification"


def test_init_treats_texts_beside_other_columns_as_a_table_by_default(tmp_path: Path) -> None:
    rows = "\n".join(
        f"{line},{n % 7},{n * n % 11}" for n, line in enumerate(_texts(99).splitlines()[1:])
    )
    text = f"label,text,size,age\n{rows}\n"
    proposal = table(tmp_path, text)
    assert proposal.params["data"]["task"] == "table_classification"
    assert any(
        "'text' is free text, which tables do not use. To learn from texts only, start with --task"
        in warning
        for warning in proposal.warnings
    )
    of_texts = table(tmp_path, text, task="text_classification").params["data"]
    assert of_texts["text_columns"] == ["text"]


def test_a_task_of_texts_is_refused_for_a_table_without_texts() -> None:
    with pytest.raises(ParamsError, match=r"no column of .* holds texts"):
        propose(inspect(wine(Path())), "text_classification", "cultivar", machine=LAPTOP)


def test_a_numeric_task_is_refused_for_a_target_of_words(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"'label' holds ham, spam, expected numbers"):
        table(tmp_path, _texts(99), task="text_regression", target="label")


def _texts(rows: int) -> str:
    lines = [f"{'ham' if n % 3 else 'spam'},see you at {n} in the usual place" for n in range(rows)]
    return "label,text\n" + "\n".join(lines)


def test_a_table_with_a_header_only_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has a header but no rows\. Add rows\."):
        table(tmp_path, "text,label\n")


def test_proposal_names_folders_without_files_which_are_no_classes(tmp_path: Path) -> None:
    for number, (name, text) in enumerate(sentences(60, seed=1)):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / f"{number}.txt").write_text(text)
    (tmp_path / "copied later" / "deeper").mkdir(parents=True)
    notes = inspect(tmp_path).notes
    assert notes == ("no classes, because the folders are empty: copied later",)


@pytest.mark.parametrize("packed", [None, "zip", "gztar"])
def test_class_folders_of_texts_become_a_task_of_texts_in_their_encoding(
    tmp_path: Path, packed: str | None
) -> None:
    folder = tmp_path / "texts"
    for number, (name, text) in enumerate(sentences(60, seed=1)):
        place = folder / ("train", "train", "test")[number // 2 % 3] / name
        place.mkdir(parents=True, exist_ok=True)
        text = f"\u611b {text}"  # no letter of Windows-1252
        (place / str(number)).write_text(text, encoding="gb18030")  # names without an ending
    path = Path(shutil.make_archive(str(folder), packed, folder)) if packed else folder
    summary = inspect(path)
    assert (summary.form, summary.num_rows, summary.is_exact) == ("text folders", 60, True)
    assert summary.given == {"train": 40, "test": 20}
    proposal = propose(summary, machine=LAPTOP)
    data = proposal.params["data"]
    assert data["path"] == str(path)
    assert (data["task"], data["text_columns"]) == ("text_classification", ["text"])
    assert (data["encoding"], data["split_folders"]) == ("gb18030", "auto")
    assert proposal.params["train"]["network"] == "hashed_ngrams"
    assert proposal.params["precompute"]["max_text_bytes"] == 128
    assert "accuracy" in proposal.params["evaluate"]["gates"]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "txt"])
def test_an_archive_of_texts_without_class_folders_is_a_table_or_refused(
    tmp_path: Path, ending: str
) -> None:
    rows = [line.split(",") for line in _texts(99).splitlines()]
    written = {
        "csv": _texts(99),
        "jsonl": "".join(
            json.dumps(dict(zip(rows[0], row, strict=True))) + "\n" for row in rows[1:]
        ),
        "txt": "some words",
    }
    with zipfile.ZipFile(tmp_path / "texts.zip", "w") as archive:
        archive.writestr(f"inside/texts.{ending}", written[ending])
    if ending == "txt":
        with pytest.raises(DataError, match="Sort the files into one folder per class"):
            inspect(tmp_path / "texts.zip")
        return
    params = propose(inspect(tmp_path / "texts.zip"), machine=LAPTOP).params
    assert params["data"]["task"] == "text_classification"
    assert (params["data"]["text_columns"], params["data"]["target_column"]) == (["text"], "label")


def test_class_folders_of_documents_and_another_task_are_refused_by_name(tmp_path: Path) -> None:
    for name in ("good", "bad"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.txt").write_text("some words")
    with pytest.raises(ParamsError, match="has one folder per class"):
        propose(inspect(tmp_path), "text_regression", machine=LAPTOP)
    for name in ("good", "bad"):
        (tmp_path / name / "1.txt").rename(tmp_path / name / "1.pdf")
    with pytest.raises(DataError, match=r"holds documents, such as .*1\.pdf"):
        inspect(tmp_path)


def test_names_of_images_without_the_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"names images such as 'a0\.png'.* is not a file"):
        table(tmp_path, "file,label\n" + "\n".join(f"a{n}.png,{n % 2}" for n in range(40)))


# Warnings -----------------------------------------------------------------------------------------


def test_init_leaves_out_a_class_of_two_rows_with_a_warning(tmp_path: Path) -> None:
    labels = ["a"] * 60 + ["b"] * 60 + ["c"] * 2
    rows = "\n".join(f"{n * 37 % 101},{label}" for n, label in enumerate(labels))
    proposal = table(tmp_path, f"x,label\n{rows}")
    assert proposal.params["data"]["classes"] == ["a", "b"]
    assert any("'c' (2 rows)" in text for text in proposal.warnings)


@pytest.mark.parametrize(("num_classes", "top_k"), [(2, None), (3, None), (4, 3)])
def test_init_proposes_no_top_k_for_so_few_classes(
    num_classes: int, top_k: int | None, tmp_path: Path
) -> None:
    rows = "\n".join(f"{n * 37 % 101},{'abcd'[n % num_classes]}" for n in range(160))
    found = filled(table(tmp_path, f"x,label\n{rows}").params)
    assert found["evaluate"]["top_k"] == top_k


def test_init_warns_of_a_sparse_column_and_a_copy_of_the_target(tmp_path: Path) -> None:
    rows = "\n".join(
        f"{n * 37 % 101},{'' if n % 2 else n * 7 % 5},{n % 2 * 3.5 + n % 7 / 100},{'ab'[n % 2]}"
        for n in range(200)
    )
    warnings = table(tmp_path, f"x,sparse,copy,label\n{rows}").warnings
    assert any("'sparse' has no value in 50%" in text for text in warnings)
    assert any(
        text.startswith("suspected leak") and "'copy' alone predicts the target" in text
        for text in warnings
    )
    assert not any("'x'" in text for text in warnings)


def test_init_proposes_to_merge_spellings_of_one_class(tmp_path: Path) -> None:
    rows = "\n".join(f"{n * 37 % 101},{('cat', 'dog', 'cat', 'Cat')[n % 4]}" for n in range(90))
    assert table(tmp_path, f"x,label\n{rows}").params["data"]["label_map"] == {"Cat": "cat"}


def test_baseline_of_the_gate_counts_spellings_of_one_class_once(tmp_path: Path) -> None:
    rows = "".join(
        f"{i % 7},{'Yes' if i % 90 == 0 else 'yes' if i % 9 == 0 else 'no'}\n" for i in range(900)
    )
    proposal = table(tmp_path, "x,label\n" + rows)
    assert proposal.params["data"]["label_map"] == {"Yes": "yes"}
    assert "the majority class alone has 0.500" in proposal.reasons["evaluate.gates"]


def test_init_warns_of_a_class_that_may_be_misspelt(tmp_path: Path) -> None:
    rows = "".join(
        f"{i % 7},{'noo' if i % 90 == 0 else 'yes' if i % 3 else 'no'}\n" for i in range(900)
    )
    found = " ".join(table(tmp_path, "x,label\n" + rows).warnings)
    assert "classes that may be misspelt: 'noo' (10 rows) and 'no' (290)" in found
    assert "data.label_map to {noo: 'no'}" in found


@pytest.mark.parametrize("target", ["label", "amount"])
def test_init_says_how_many_rows_without_a_target_are_set_aside(
    target: str, tmp_path: Path
) -> None:
    rows = "".join(f"{i % 7},{'ab'[i % 2]},{i * 0.7:.1f}\n" * (i % 5 > 0) for i in range(400))
    rows += "3,,\n" * 80
    found = " ".join(table(tmp_path, "x,label,amount\n" + rows, target=target).warnings)
    assert f"'{target}' has no value in 20.0% of the rows: they are set aside" in found


def test_init_warns_of_too_few_test_rows_for_a_gate(tmp_path: Path) -> None:
    rows = "\n".join(f"{n * 37 % 101},{n * 7.3 % 11:.3f}" for n in range(12))
    proposal = table(tmp_path, f"x,y\n{rows}")
    assert proposal.params["evaluate"]["gates"] == {}
    assert any(text.startswith("no gate:") for text in proposal.warnings)


# Length of the training ---------------------------------------------------------------------------


def test_init_proposes_at_least_300_steps_or_gives_the_reason(
    tmp_path: Path,
) -> None:
    summary = inspect(class_folders(tmp_path))
    small = propose(summary, machine=LAPTOP).params["train"]
    assert 112 / small["batch_size"] * small["epochs"] >= 300
    large = replace(summary, classes={"0": 10**7, "1": 10**7}, num_rows=2 * 10**7)
    assert "2 cores without a GPU" in propose(large, machine=LAPTOP).reasons["train.epochs"]
    gpu = propose(large, machine=replace(LAPTOP, has_gpu=True)).params["train"]
    assert gpu["epochs"] >= propose(large, machine=LAPTOP).params["train"]["epochs"]


def test_init_proposes_pretrained_weights_with_their_licence_for_photographs(
    tmp_path: Path,
) -> None:
    summary = inspect(SHAPES["photographs"].make(tmp_path))
    weights = Weights("timm/resnet18", "weights/resnet18.pth", "licence Apache-2.0")
    search = WeightSearch(weights)
    proposal = propose(summary, search=search, machine=LAPTOP)
    assert proposal.params["train"]["network"] == "timm/resnet18"
    assert proposal.params["train"]["pretrained"] == "weights/resnet18.pth"
    assert "Apache-2.0" in proposal.reasons["train.pretrained"]
    assert proposal.weights == weights
    small = propose(inspect(class_folders(tmp_path)), search=search, machine=LAPTOP)
    assert small.params["train"]["network"] == "small_resnet"
    assert small.weights is None


def test_init_freezes_a_pretrained_body_for_all_epochs_unless_there_is_a_gpu(
    tmp_path: Path,
) -> None:
    summary = inspect(SHAPES["photographs"].make(tmp_path))
    search = WeightSearch(Weights("timm/resnet18", "weights/resnet18.pth", ""))
    params = propose(summary, search=search, machine=LAPTOP).params
    frozen = params["train"]
    assert frozen["freeze_epochs"] == frozen["epochs"] >= 30
    assert params["augment"].keys() <= {"forbid"}  # so that the body computes once
    with_gpu = propose(summary, search=search, machine=replace(LAPTOP, has_gpu=True)).params
    tuned = with_gpu["train"]
    assert tuned["freeze_epochs"] == 1 < tuned["epochs"]
    assert "brightness" in with_gpu["augment"]


def test_init_warns_first_and_last_of_photographs_without_pretrained_weights(
    tmp_path: Path,
) -> None:
    search = WeightSearch(None, ("a package that is not used",), "looked for this and that")
    proposal = propose(inspect(SHAPES["photographs"].make(tmp_path)), search=search)
    assert proposal.warnings[:2] == proposal.last_words
    assert proposal.last_words == ("a package that is not used", "looked for this and that")
    small = propose(inspect(class_folders(tmp_path)), search=search)
    assert small.last_words == ()


# Notes on columns ---------------------------------------------------------------------------------


def logins(
    signup: str = "%Y-%m-%d", login: str = "%d.%m.%Y %H:%M", renewal: str = "", gaps: int = 0
) -> str:
    """Return a CSV of 120 customers with dates in these formats; "" leaves a column out."""
    formats = {"signup_date": signup, "last login": login, "renewal": renewal}
    formats = {name: written for name, written in formats.items() if written}
    lines = [",".join(("Customer ID", *formats, "age", "churned"))]
    for row in range(120):
        moment = datetime(2024, 1, 1) + timedelta(hours=31 * row)
        dates = [moment.strftime(written) if row >= gaps else "" for written in formats.values()]
        label = "Yes" if row % 20 == 0 else ("no", "yes")[row % 2]
        lines.append(",".join((f"C{row:04d}", *dates, str(20 + row % 41), label)))
    return "\n".join(lines) + "\n"


def test_init_names_all_date_columns_and_those_written_in_the_proposed_format(
    tmp_path: Path,
) -> None:
    found = table(tmp_path, logins(), target="churned")
    assert found.params["data"]["date_format"] == "%d.%m.%Y %H:%M"
    assert "'last login'" in found.reasons["data.date_format"]
    assert "'signup_date'" not in found.reasons["data.date_format"]
    assert "time_column" not in found.params["data"]
    (dates,) = (text for text in found.warnings if text.startswith("columns of dates"))
    assert "'signup_date', 'last login'" in dates
    assert "set data.time_column" in dates


def test_init_proposes_the_only_dates_as_time_column_in_any_format(tmp_path: Path) -> None:
    found = table(tmp_path, logins(signup=""), target="churned")
    assert found.params["data"]["time_column"] == "last login"
    gaps = table(tmp_path, logins(login="", gaps=6), target="churned")
    assert "time_column" not in gaps.params["data"]
    assert "'signup_date' (5.0% of the rows have none)" in "\n".join(gaps.warnings)


def test_a_target_of_a_few_dates_is_said_to_be_dates(tmp_path: Path) -> None:
    days = ["2024-03-31", "2024-06-30", "2024-09-30"]
    rows = [f"{row % 17},{row % 13},{days[row % 3]}" for row in range(90)]
    (tmp_path / "t.csv").write_text("\n".join(["a,b,label", *rows, ""]))
    proposal = propose(inspect(tmp_path / "t.csv"), target="label", machine=LAPTOP)
    assert "holds dates, each of which becomes a class: " in proposal.reasons["data.task"]


def test_init_warns_of_dates_in_a_second_format(tmp_path: Path) -> None:
    found = table(tmp_path, logins(renewal="%d %b %Y"), target="churned")
    assert found.params["data"]["date_format"] == "%d.%m.%Y %H:%M"
    (other,) = (text for text in found.warnings if text.startswith("'renewal'"))
    assert "'%d %b %Y'" in other
    assert "ISO 8601" in other


def test_init_names_the_columns_that_the_model_will_not_read(tmp_path: Path) -> None:
    (unread,) = (
        text
        for text in table(tmp_path, logins(), target="churned").warnings
        if text.startswith("columns that the model will not read")
    )
    assert "'Customer ID' (ids or free text: 120 different values in 120 cells)" in unread
    assert "age" not in unread
    assert "login" not in unread


def test_reason_for_the_task_lists_classes_after_joining_their_spellings(tmp_path: Path) -> None:
    found = table(tmp_path, logins(), target="churned")
    assert found.params["data"]["label_map"] == {"Yes": "yes"}
    assert found.reasons["data.task"] == "'churned' holds classes: yes, no"


# Several labels -----------------------------------------------------------------------------------


def labelled(rows: int = 120) -> str:
    """Return a CSV with several labels per row: with separators, as JSON lists, and in columns."""
    lines = ["x,tags,listed,is_a,is_b"]
    for row in range(rows):
        labels = [name for name, is_given in (("a", row % 2), ("b", row % 3)) if is_given]
        listed = json.dumps(labels).replace('"', '""')
        lines.append(f'{row / 7},{"|".join(labels) or "[]"},"{listed}",{row % 2},{row % 3 > 0}')
    return "\n".join(lines) + "\n"


def test_init_proposes_the_only_column_of_lists_as_multi_label_target(tmp_path: Path) -> None:
    found = table(tmp_path, labelled()).params
    assert found["data"]["task"] == "table_multilabel"
    assert found["data"]["target_column"] == "listed"
    assert filled(found)["data"]["label_separator"] == "|"
    assert list(found["evaluate"]["gates"]) == ["subset_accuracy"]


def test_init_asks_if_a_column_with_separators_has_several_labels(tmp_path: Path) -> None:
    (question,) = table(tmp_path, labelled(), target="tags").questions
    assert question.candidates == ("table_multilabel", "table_classification")
    assert "label sets or classes" in question.text


def repairs(mark: str, rows: int = 160) -> str:
    """Return a CSV with sets of four labels, whose combinations are more than the labels."""
    names = ["Heizung", "Lüftung", "Kühlung", "Strom"]
    lines = ["x\ttags"]
    for row in range(rows):
        chosen = [name for place, name in enumerate(names) if (row % 15 + 1) >> place & 1]
        lines.append(f"{row / 7:.2f}\t{mark.join(chosen)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("mark", [";", ",", ", ", "/", "|"])
def test_init_recognises_few_labels_in_many_combinations_and_proposes_their_separator(
    tmp_path: Path, mark: str
) -> None:
    (question,) = table(tmp_path, repairs(mark), target="tags").questions
    assert question.candidates == ("table_multilabel", "table_classification")
    assert f"{mark.strip()!r} divides them into 4 labels: " in question.text
    found = table(tmp_path, repairs(mark), "table_multilabel", "tags")
    assert found.params["data"]["label_separator"] == mark.strip()
    assert "data.label_separator" in found.reasons
    data = parse_params(dict(found.params)).data
    rows = cleaned(data, rules={"near_duplicate": None}).cleaned.rows
    assert label_counts(rows["label"]).keys() == {"Heizung", "Lüftung", "Kühlung", "Strom"}
    as_classes = table(tmp_path, repairs(mark), "table_classification", "tags")
    assert not any("misspelt" in warning for warning in as_classes.warnings)


@pytest.mark.parametrize(
    "values",
    [
        ["Black/African American", "White", "Asian/Pacific"],
        ["1/2", "2/3", "3/1", "1/3", "2/1"],
        ["1,5", "2,5", "1,2", "5,2"],
        ["Trinidad, Tobago", "Cuba", "Antigua, Barbuda"],
    ],
)
def test_a_separator_in_few_names_or_numbers_makes_no_label_sets(
    tmp_path: Path, values: list[str]
) -> None:
    rows = [f"{row / 7:.2f}\t{values[row * row % len(values)]}" for row in range(160)]
    found = table(tmp_path, "\n".join(["x\ttags", *rows, ""]), target="tags")
    assert "multilabel" not in str(found.questions) + str(found.params)


def test_several_true_false_columns_become_one_label_each(tmp_path: Path) -> None:
    found = table(tmp_path, labelled(), target="is_a, is_b").params
    assert found["data"]["task"] == "table_multilabel"
    assert found["data"]["target_column"] == ["is_a", "is_b"]


def test_label_column_that_is_not_true_or_false_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"'x' holds .* expected true or false"):
        table(tmp_path, labelled(), target="is_a,x")
    with pytest.raises(ParamsError, match=r"'is_c', which is not there\. The columns are .*is_a"):
        table(tmp_path, labelled(), target="is_a,is_c")


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        ("\u5473\u9053\u5f88\u597d\uff0c\u9001\u9910\u5f88\u5feb\u3002", "gb18030"),
        ("Fu\u00dfg\u00e4nger \u00fcberqueren die Stra\u00dfe", "windows-1252"),
        (
            "\u00c7a va ? \u00c0 bient\u00f4t, l'\u00e9t\u00e9 a \u00e9t\u00e9 tr\u00e8s chaud",
            "windows-1252",
        ),
        ("\u5473\u9053\u5f88\u597d", "utf-8"),
    ],
)
def test_encoding_of_a_text_is_guessed_from_its_bytes(text: str, encoding: str) -> None:
    assert encoding_of(text.encode(encoding)) == encoding
