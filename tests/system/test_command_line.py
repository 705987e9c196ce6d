import pytest

from slipway.system.command_line import CommandParser, fraction, positive_number, whole_number


@pytest.mark.parametrize(
    ("option", "text", "expected"),
    [
        ("--share", "1.5", "a number from 0 to 1"),
        ("--share", "half", "a number from 0 to 1"),
        ("--rows", "0", "a whole number from 1 to 1,000"),
        ("--rows", "2.5", "a whole number from 1 to 1,000"),
        ("--rows", "1001", "a whole number from 1 to 1,000"),
        ("--seconds", "soon", "a number above 0"),
    ],
)
def test_error_for_a_wrong_value_names_the_value_and_what_was_expected(
    option: str, text: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = CommandParser(prog="slipway it")
    parser.add_argument("--share", type=fraction)
    parser.add_argument("--rows", type=whole_number(1000))
    parser.add_argument("--seconds", type=positive_number)
    right = parser.parse_args(["--share", "1", "--rows", "1000", "--seconds", "0.5"])
    assert (right.share, right.rows, right.seconds) == (1.0, 1000, 0.5)
    with pytest.raises(SystemExit):
        parser.parse_args([option, text])
    assert f"argument {option}: found '{text}', expected {expected}" in capsys.readouterr().err
