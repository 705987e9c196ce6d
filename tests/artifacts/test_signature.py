"""Signed releases: covered files, refused signatures, and an independent verifier."""

import json
import random
import shutil
import subprocess
import sys
from datetime import UTC, datetime
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

from slipway.artifacts.bundle import load_bundle
from slipway.artifacts.signature import (
    SIGNATURE,
    require_untracked_keys,
    sign,
    verify,
    verify_by_any,
)
from slipway.cli.model import verify_bundle as verify_command
from slipway.export.release import RELEASED, release, verify_bundle
from slipway.preflight.project import repository_mistakes
from slipway.serving.models.loader import load_model
from slipway.serving.rollout.store import add_model, settings_of
from slipway.serving.settings import Settings
from slipway.system import files
from slipway.system.errors import IntegrityError, SlipwayError
from tests.serving.bundles import certify, write_bundle
from tests.serving.in_process import read_all_settings

NUM_FLIPS = 1000


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a private and a public key. Returns their paths."""
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
    """Make a signed release in the current folder."""
    monkeypatch.chdir(tmp_path)
    certify(tmp_path / "artifacts/certificate.json", write_bundle(tmp_path / "artifacts/bundle"))
    assert "and signed" in release(keys[0])
    return tmp_path / RELEASED


def test_signed_release_is_verified_also_as_a_copy_elsewhere(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    copy = shutil.copytree(released, tmp_path / "elsewhere/model")
    for folder in (released, copy):
        summary = verify_bundle(folder, keys[1:])
        assert "gates" in summary
        assert f"signed with the key of {keys[1]}" in summary


@pytest.mark.process
def test_reference_verifier_of_the_format_accepts_the_signature(
    released: Path, keys: tuple[Path, Path]
) -> None:
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(released)]
    command += ["--signature", str(released / SIGNATURE), "--public_key", str(keys[1])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, "succeeded" in done.stdout) == (0, True), done.stderr


@pytest.mark.nightly
def test_a_signature_with_any_flipped_byte_is_refused(
    released: Path, keys: tuple[Path, Path]
) -> None:
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
        verify_bundle(released, keys[1:])


def test_signature_of_another_key_is_refused(tmp_path: Path, released: Path) -> None:
    _, other = write_keys(tmp_path, "other")
    with pytest.raises(IntegrityError, match=r"does not hold for .*other\.pub: Key mismatch"):
        verify_bundle(released, [other])


def sha256_of(key: Path) -> str:
    return files.sha256_file(key)  # the PEM is as OpenSSL writes it


def write_list(folder: Path, **entry: object) -> Path:
    path = folder / "keys.json"
    path.write_text(json.dumps({"format_version": 1, "keys": [entry]}))
    return path


def test_old_and_new_key_are_accepted_and_the_summary_names_the_signer(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    _, newer = write_keys(tmp_path, "newer")
    own = sha256_of(keys[1])
    listed = write_list(tmp_path, sha256=own, expires="2999-01-01T00:00:00Z")
    given = ["--key", str(newer), "--key", str(keys[1]), "--key-list", str(listed)]
    done = CliRunner().invoke(verify_command, [str(released), *given])
    assert done.exit_code == 0, done.output
    assert f"signed with the key of {keys[1]} (SHA-256 {own[:12]}" in done.output
    assert "valid until 2999-01-01T00:00:00+00:00" in done.output


@pytest.mark.parametrize(
    ("entry", "now", "message"),
    [
        ({"revoked": "laptop stolen"}, None, "was revoked: laptop stolen"),
        ({"expires": "2026-01-01T00:00:00+01:00"}, None, "expired at 2026-01-01T00"),
        ({"expires": "2999-01-01T00:00:00Z"}, datetime(2999, 1, 1, tzinfo=UTC), "expired at 2999"),
    ],
    ids=["revoked", "expired", "expires now"],
)
def test_signature_of_a_revoked_or_expired_key_is_refused_with_the_reason(
    tmp_path: Path,
    released: Path,
    keys: tuple[Path, Path],
    entry: dict[str, str],
    now: datetime | None,
    message: str,
) -> None:
    listed = write_list(tmp_path, sha256=sha256_of(keys[1]), **entry)
    with pytest.raises(IntegrityError, match=message):
        verify_by_any(released, keys[1:], listed, now)
    others = write_list(tmp_path, sha256="0" * 64, **entry)
    verify_by_any(released, keys[1:], others, now)


def test_revoked_key_is_refused_in_any_form_of_its_pem(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    listed = write_list(tmp_path, sha256=sha256_of(keys[1]), revoked="stolen")
    keys[1].write_text("a comment\n" + keys[1].read_text().replace("\n", "\r\n"))
    with pytest.raises(IntegrityError, match="was revoked: stolen"):
        verify_by_any(released, keys[1:], listed)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("keys", "is not JSON"),
        ('{"format_version": 2, "keys": []}', "has format version 2"),
        ('{"format_version": 1, "keys": [{"sha256": "AB"}]}', "is not a valid KeyList"),
        ('{"format_version": 1, "keys": [{"expires": "2027-01-01T00:00:00"}]}', "timezone"),
    ],
)
def test_unreadable_key_list_refuses_every_model(
    tmp_path: Path, released: Path, keys: tuple[Path, Path], content: str, message: str
) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    with pytest.raises(SlipwayError, match=f"(?s){message}.*sha256sum signing.pub"):
        verify_by_any(released, keys[1:], path)
    path.unlink()
    with pytest.raises(SlipwayError, match="cannot be read"):
        verify_by_any(released, keys[1:], path)


def test_service_reads_the_list_of_keys_at_each_load(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    listed = write_list(tmp_path, sha256="0" * 64, revoked="another key")
    settings = settings_for(released, released / "certificate.json", keys[1], key_list=listed)
    load_model(settings)
    write_list(tmp_path, sha256=sha256_of(keys[1]), revoked="laptop stolen")
    with pytest.raises(IntegrityError, match="was revoked: laptop stolen"):
        load_model(settings)
    with pytest.raises(SlipwayError, match="SLIPWAY_SIGNERS names no key"):
        load_model(settings_for(released, released / "certificate.json", key_list=listed))


def settings_for(
    folder: Path, certificate: Path, *signers: Path, key_list: Path | None = None
) -> Settings:
    return read_all_settings(
        {
            "SLIPWAY_BUNDLE": str(folder),
            "SLIPWAY_CERTIFICATE": str(certificate),
            "SLIPWAY_STATE": str(folder.parent / "state"),
            "SLIPWAY_SIGNERS": ",".join(map(str, signers)),
            "SLIPWAY_SIGNER_LIST": str(key_list or ""),
        }
    )


def test_service_that_requires_a_signer_loads_a_release_of_any_of_them(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    _, other = write_keys(tmp_path, "other")
    certificate = released / "certificate.json"
    load_model(settings_for(released, certificate, other, keys[1]))
    load_model(settings_for(released, certificate))
    with pytest.raises(IntegrityError, match="Key mismatch"):
        load_model(settings_for(released, certificate, other))


def test_service_that_requires_a_signer_refuses_an_unsigned_bundle_or_certificate(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    artifacts = tmp_path / "artifacts"
    unsigned = settings_for(artifacts / "bundle", artifacts / "certificate.json", keys[1])
    with pytest.raises(IntegrityError, match="no signature covers the certificate"):
        load_model(unsigned)
    certify(artifacts / "certificate.json", load_bundle(released), versions={"other": "1"})
    with pytest.raises(IntegrityError, match="no signature covers the certificate"):
        load_model(settings_for(released, artifacts / "certificate.json", keys[1]))


def test_copy_of_a_rolled_out_release_keeps_its_signature(
    released: Path, keys: tuple[Path, Path]
) -> None:
    certificate = released / "certificate.json"
    settings = settings_for(released, certificate, keys[1])
    copied = settings_of(settings, add_model(settings.state, released, certificate, None))
    assert copied.bundle != released
    load_model(copied)
    (copied.bundle / "further.json").write_text("{}")
    with pytest.raises(IntegrityError, match=r"further\.json"):
        load_model(copied)


def test_unsigned_copy_of_the_same_bundle_is_another_copy(
    released: Path, keys: tuple[Path, Path]
) -> None:
    certificate = released / "certificate.json"
    settings = settings_for(released, certificate, keys[1])
    signed = add_model(settings.state, released, certificate, None)
    (released / SIGNATURE).unlink()
    unsigned = add_model(settings.state, released, certificate, None)
    assert signed != unsigned
    with pytest.raises(IntegrityError, match="no signature covers the certificate"):
        load_model(settings_of(settings, unsigned))


def test_release_refuses_a_key_of_another_type_or_without_content(
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


def test_command_without_a_key_says_that_the_signature_was_not_checked(
    released: Path, keys: tuple[Path, Path]
) -> None:
    done = CliRunner().invoke(verify_command, [str(released)])
    assert (done.exit_code, "was not checked: give --key" in done.output) == (0, True)
    assert f"by a key of SHA-256 {sha256_of(keys[1])[:12]}," in done.output
    (released / SIGNATURE).unlink()
    assert CliRunner().invoke(verify_command, [str(released)]).output.endswith("not signed\n")


def test_a_private_key_that_git_tracks_is_refused_and_a_public_one_is_not(
    tmp_path: Path, keys: tuple[Path, Path]
) -> None:
    def run_git(*arguments: str) -> None:
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True, capture_output=True)

    require_untracked_keys(tmp_path)  # no repository
    run_git("init")
    (tmp_path / "public.pem").write_bytes(keys[1].read_bytes())
    run_git("add", "public.pem")
    require_untracked_keys(tmp_path)
    run_git("add", "--force", keys[0].name)
    with pytest.raises(
        SlipwayError, match=r"tracks the private key 'signing\.pem'.*git rm --cached"
    ):
        require_untracked_keys(tmp_path)
    run_git("rm", "--cached", keys[0].name)
    require_untracked_keys(tmp_path)


def test_release_and_check_refuse_a_tracked_key(
    tmp_path: Path, released: Path, keys: tuple[Path, Path]
) -> None:
    subprocess.run(["git", "init"], cwd=tmp_path, check=True, capture_output=True)
    subprocess.run(["git", "add", "--force", keys[0]], cwd=tmp_path, check=True)
    assert any("private key 'signing.pem'" in text for text in repository_mistakes())
    with pytest.raises(SlipwayError, match=r"private key 'signing\.pem'"):
        release()
    assert (released / "model.sig").is_file()  # the former release stays
