"""Signed releases: what is covered, what is refused, and a verifier that is not ours."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from slipway.cli.model import verify_bundle as verify_command
from slipway.export.release import RELEASED, release, verify_bundle
from slipway.export.signature import SIGNATURE, sign, verify
from slipway.system.errors import IntegrityError, SlipwayError
from tests.serving.bundles import certify, write_bundle

NUM_FLIPS = 1000


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a private and a public key."""
    key = ec.generate_private_key(ec.SECP256R1())
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
    )
    public.write_bytes(
        key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    )
    return private, public


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    return write_keys(tmp_path, "signing")


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[Path, Path]) -> Path:
    """A signed release in the current folder."""
    monkeypatch.chdir(tmp_path)
    certify(tmp_path / "artifacts/certificate.json", write_bundle(tmp_path / "artifacts/bundle"))
    assert "and signed" in release(keys[0])
    return tmp_path / RELEASED


def test_signed_release_is_verified_also_as_a_copy_elsewhere(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    copy = shutil.copytree(released, tmp_path / "elsewhere/model")
    for folder in (released, copy):
        summary = verify_bundle(folder, keys[1])
        assert "gates" in summary
        assert f"signed with the key of {keys[1]}" in summary


@pytest.mark.process
def test_verifier_of_the_format_accepts_the_signature(
    released: Path, keys: tuple[Path, Path]
) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(released)]
    command += ["--signature", str(released / SIGNATURE), "--public_key", str(keys[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "succeeded" in done.stdout) == (0, True), done.stderr


@pytest.mark.nightly
def test_no_flipped_byte_is_accepted(released: Path, keys: tuple[Path, Path]) -> None:
    draw = random.Random(28)
    paths = sorted(path for path in released.iterdir() if path.name != SIGNATURE)
    sizes = [path.stat().st_size for path in paths]
    accepted = []
    for _ in range(NUM_FLIPS):
        (path,) = draw.choices(paths, weights=sizes)
        content = bytearray(path.read_bytes())
        place = draw.randrange(len(content))
        content[place] ^= 1 << draw.randrange(8)
        good = path.read_bytes()
        path.write_bytes(content)
        try:
            verify(released, keys[1])
            accepted.append((path.name, place))
        except IntegrityError:
            pass
        path.write_bytes(good)
    assert accepted == []
    verify(released, keys[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "further.onnx").write_bytes(b"x"), "further.onnx"),
        (lambda folder: (folder / "certificate.json").unlink(), "certificate.json"),
        (lambda folder: (folder / SIGNATURE).unlink(), "is not signed"),
        (lambda folder: (folder / SIGNATURE).write_bytes(b"{}"), "does not hold"),
    ],
    ids=["added", "removed", "no signature", "signature changed"],
)
def test_changed_folder_is_refused_and_the_error_names_what_changed(
    released: Path, keys: tuple[Path, Path], change: object, message: str
) -> None:
    assert callable(change)
    change(released)
    with pytest.raises(IntegrityError, match=message):
        verify_bundle(released, keys[1])


def test_signature_of_another_key_is_refused(tmp_path: Path, released: Path) -> None:
    _, other = write_keys(tmp_path, "other")
    with pytest.raises(IntegrityError, match=r"does not hold for .*other\.pub: Key mismatch"):
        verify_bundle(released, other)


def test_key_of_another_type_or_without_content_is_refused_and_nothing_is_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: tuple[Path, Path]
) -> None:
    monkeypatch.chdir(tmp_path)
    certify(tmp_path / "artifacts/certificate.json", write_bundle(tmp_path / "artifacts/bundle"))
    empty, other = tmp_path / "empty.pem", tmp_path / "rsa.pem"
    empty.write_bytes(b"")
    other.write_bytes(
        rsa.generate_private_key(65537, 2048).private_bytes(
            Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
        )
    )
    for key in (empty, other, keys[1]):
        with pytest.raises(SlipwayError, match=f"{key.name} cannot be used .* a private key"):
            release(key)
    assert not (tmp_path / RELEASED).exists()
    folder = tmp_path / "artifacts/bundle"
    sign(folder, keys[0])
    with pytest.raises(SlipwayError, match="expected a public key on a NIST curve"):
        verify(folder, keys[0])


def test_command_without_a_key_says_that_the_signature_was_not_checked(released: Path) -> None:
    done = CliRunner().invoke(verify_command, [str(released)])
    assert (done.exit_code, "its signature was not checked: give --key" in done.output) == (0, True)
    (released / SIGNATURE).unlink()
    assert CliRunner().invoke(verify_command, [str(released)]).output.endswith("not signed\n")
