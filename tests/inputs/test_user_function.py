"""User functions are verified by digest before they run, and their faults are reported."""

import importlib
from pathlib import Path

import pytest
from PIL import Image

from slipway.inputs import user_function
from slipway.system.errors import ImageError, IntegrityError, ParamsError, UnavailableError
from tests.user_functions import WriteFunctions, _write_functions  # noqa: F401 - a fixture

IMAGE = Image.new("RGB", (8, 6), (10, 20, 30))
CROP = """def crop(image):
    return image.crop((0, 0, 4, 4)), {'left': 0, 'share': 0.5, 'name': 'a', 'found': True}
"""


def run(function: str, image: Image.Image = IMAGE) -> tuple[Image.Image, user_function.Values]:
    return user_function.run(function, user_function.code_digest(function), image)


def test_transform_may_return_an_image_or_an_image_with_values(
    write_functions: WriteFunctions,
) -> None:
    write_functions(
        "faces", {"__init__.py": "", "crops.py": CROP + "def same(image):\n    return image\n"}
    )
    made, values = run("faces.crops:crop")
    assert (made.size, values) == ((4, 4), {"left": 0, "share": 0.5, "name": "a", "found": True})
    assert run("faces.crops:same") == (IMAGE, {})


def test_numpy_numbers_returned_by_a_transform_become_python_numbers(
    write_functions: WriteFunctions,
) -> None:
    source = (
        "import numpy\ndef f(image):\n    return image, "
        "{'a': numpy.int64(3), 'b': numpy.float32(0.5), 'c': numpy.bool_(True)}\n"
    )
    write_functions("faces", {"__init__.py": source})
    _, values = run("faces:f")
    assert {name: type(value) for name, value in values.items()} == {
        "a": int,
        "b": float,
        "c": bool,
    }


def test_code_digest_covers_exactly_the_functions_package(
    write_functions: WriteFunctions, tmp_path: Path
) -> None:
    folder = write_functions(
        "faces", {"__init__.py": "", "crops.py": CROP, "deep/inner.py": "A = 1\n"}
    )
    digest = user_function.code_digest("faces.crops:crop")
    (folder / "notes.txt").write_text("not code")
    (tmp_path / "code" / "beside.py").write_text("A = 1\n")
    assert user_function.code_digest("faces.crops:crop") == digest
    seen = {digest}
    for name in ("__init__.py", "crops.py", "deep/inner.py", "new.py"):
        with (folder / name).open("a") as file:
            file.write("# changed\n")
        seen.add(user_function.code_digest("faces.crops:crop"))
    (folder / "new.py").rename(folder / "newer.py")
    seen.add(user_function.code_digest("faces.crops:crop"))
    assert len(seen) == 6


def test_code_digest_of_a_single_module_covers_its_file(
    write_functions: WriteFunctions, tmp_path: Path
) -> None:
    write_functions("unused", {})
    path = tmp_path / "code" / "lone_module_of_a_test.py"
    path.write_text(CROP)
    first = user_function.code_digest("lone_module_of_a_test:crop")
    path.write_text(CROP + "# changed\n")
    assert user_function.code_digest("lone_module_of_a_test:crop") != first


def test_load_refuses_changed_code_before_any_of_it_runs(
    write_functions: WriteFunctions, tmp_path: Path
) -> None:
    folder = write_functions("faces", {"__init__.py": "", "crops.py": CROP})
    digest = user_function.code_digest("faces.crops:crop")
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    (folder / "__init__.py").write_text(trap)
    with pytest.raises(IntegrityError, match=r"the code of faces.crops:crop has the SHA-256"):
        user_function.load("faces.crops:crop", digest)
    assert not (tmp_path / "ran").exists()
    user_function.load("faces.crops:crop", user_function.code_digest("faces.crops:crop"))
    assert (tmp_path / "ran").exists(), "the trap would have shown that the code ran"


def test_load_refuses_code_newer_than_the_imported_version(write_functions: WriteFunctions) -> None:
    folder = write_functions("faces", {"__init__.py": "", "crops.py": CROP})
    run("faces.crops:crop")
    (folder / "crops.py").write_text(CROP + "# changed\n")
    with pytest.raises(UnavailableError, match="already imported an older version of faces"):
        run("faces.crops:crop")


@pytest.mark.parametrize(
    "name",
    [
        "faces",
        "faces:",
        "faces.crops",
        ":crop",
        "faces/crops:crop",
        "faces.crops:crop()",
        "faces..crops:crop",
    ],
)
def test_malformed_function_name_is_refused(name: str) -> None:
    with pytest.raises(ParamsError, match=r"expected 'package\.module:function'"):
        user_function.code_digest(name)


@pytest.mark.parametrize(
    "name",
    [
        "no_such_package_there:f",
        "faces.no_such_module:f",
        "faces.crops.crop:f",
        "os:system",
        "sys:exit",
    ],
)
def test_transform_in_a_missing_module_is_refused(
    name: str, write_functions: WriteFunctions
) -> None:
    write_functions("faces", {"__init__.py": "", "crops.py": CROP})
    with pytest.raises(UnavailableError, match=r"which has no Python file here"):
        user_function.code_digest(name)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_package_there\n", "ModuleNotFoundError"),
        ("crop = 1\n", "is int, expected a function"),
        ("def other(image):\n    return image\n", "has no function 'crop'"),
        ("1 / 0\n", "ZeroDivisionError"),
    ],
)
def test_transform_that_cannot_be_imported_is_unavailable(
    write_functions: WriteFunctions, source: str, reason: str
) -> None:
    write_functions("faces", {"__init__.py": source})
    with pytest.raises(UnavailableError, match=reason):
        run("faces:crop")


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no face')", "faces:f raised ValueError: no face"),
        ("raise SystemExit(0)", "faces:f raised SystemExit: 0"),
        ("return None", "returned NoneType, expected an image"),
        ("return image, 3", "returned Image, int"),
        ("return image.crop((0, 0, 0, 5))", "an image of 0x5 pixels"),
        ("return image, {'a': float('nan')}", "returned a=nan, expected a finite number"),
        ("return image, {'a': [1]}", r"returned a=\[1\]"),
    ],
)
def test_a_failing_function_breaks_the_rule_transform_failed(
    write_functions: WriteFunctions, body: str, reason: str
) -> None:
    write_functions("faces", {"__init__.py": f"def f(image):\n    {body}\n"})
    with pytest.raises(ImageError, match=reason) as raised:
        run("faces:f")
    assert raised.value.rule == "transform_failed"


def test_computing_a_code_digest_imports_no_user_code(
    write_functions: WriteFunctions, tmp_path: Path
) -> None:
    write_functions(
        "faces",
        {"__init__.py": f"open({str(tmp_path / 'ran')!r}, 'w').close()\n", "crops.py": CROP},
    )
    user_function.code_digest("faces.crops:crop")
    assert not (tmp_path / "ran").exists()
    importlib.import_module("faces")
    assert (tmp_path / "ran").exists()
