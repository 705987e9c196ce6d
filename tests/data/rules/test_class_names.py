import yaml

from slipway.data.rules.class_names import class_hints, misspellings, variants


def test_spellings_of_one_word_are_mapped_to_the_most_frequent_one() -> None:
    counts = {"Cat": 3, "cat": 9, "YES": 1, "yes": 5, "Café": 1, "Cafe\u0301": 2, "Cafe": 1}
    counts |= {"new-york": 1, "New York": 2, "new_york": 1, "10": 1, "1-0": 1}
    assert variants(counts) == {
        "Cat": "cat",
        "YES": "yes",
        "Café": "Cafe\u0301",
        "new-york": "New York",
        "new_york": "New York",
    }


def test_whole_numbers_are_one_class_with_and_without_a_decimal_point() -> None:
    counts = {"0": 9, "0.0": 20, "1.0": 5, "1": 4, "1.00": 1, "1.5": 3, "01": 2, "v1.0": 1}
    assert variants(counts) == {"0.0": "0", "1.0": "1", "1.00": "1"}


def test_a_minus_is_no_hyphen_between_words() -> None:
    assert variants({"\u200bA": 2, "A": 9, "a\u00ad": 1}) == {"\u200bA": "A", "a\u00ad": "A"}
    assert variants({"-1": 50, "1": 50, "-1.5 °C": 9, "1.5 °C": 9, "a-1": 3, "a 1": 4}) == {
        "a-1": "a 1"
    }


def test_the_proposed_label_map_keeps_current_entries_and_quotes_yes_and_no() -> None:
    (hint,) = class_hints({"YES": 4, "yes": 5, "no": 5}, {"chat": "cat"})
    assert "'YES' (4 rows) and 'yes' (5)" in hint
    pasted = yaml.safe_load(hint.partition("params.yaml:\n")[2])
    assert pasted == {"label_map": {"chat": "cat", "YES": "yes"}}


def test_a_class_with_ten_times_the_rows_is_reported_as_an_imbalance() -> None:
    assert class_hints({"a": 99, "b": 10}, {}) == []
    (hint,) = class_hints({"a": 100, "b": 10}, {})
    assert "'a' has 100 of 110 rows, 'b' has 10" in hint
    assert "class_weights: balanced" in hint


def test_the_proposed_label_map_maps_each_name_to_its_final_spelling() -> None:
    (hint,) = class_hints({"Cat": 4, "cat": 5}, {"kat": "Cat"})
    pasted = yaml.safe_load(hint.partition("params.yaml:\n")[2])
    assert pasted == {"label_map": {"kat": "cat", "Cat": "cat"}}


def test_a_rare_name_close_to_a_frequent_one_may_be_misspelt() -> None:
    counts = {"setosa": 300, "setossa": 2, "virginica": 250, "class 1": 400, "class 2": 3}
    assert misspellings(counts) == {"setossa": "setosa"}
    assert misspellings({"setosa": 300, "setossa": 40}) == {}
    assert misspellings({"heating;cooling": 90, "heating;coolin": 2, "heating": 80}) == {}
    hint = class_hints({"no": 90, "noo": 3, "No": 2}, {})[1]
    assert hint.startswith("classes that may be misspelt: 'noo' (3 rows) and 'no' (90)")
    pasted = yaml.safe_load(hint.partition("params.yaml:\n")[2])
    assert pasted == {"label_map": {"No": "no", "noo": "no"}}
