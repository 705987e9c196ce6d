"""Guesses the type of a file that is not a readable image from its first bytes."""

_SIGNATURES = {
    b"\xff\xd8\xff": "a JPEG whose header is damaged",
    b"\x89PNG": "a PNG whose header is damaged",
    b"RIFF": "a WebP whose header is damaged, or a sound file",
    b"II*\0": "a TIFF whose header is damaged",
    b"MM\0*": "a TIFF whose header is damaged",
    b"GIF8": "a GIF whose header is damaged",
    b"%PDF": "a PDF document",
    b"PK\x03\x04": "a ZIP archive",
    b"\x1f\x8b": "a gzip archive",
    b"BZh": "a bzip2 archive",
    b"\xfd7zXZ": "an xz archive",
    b"\x28\xb5\x2f\xfd": "a zstd archive",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x00\x00\x01\x00": "an icon",
    b"8BPS": "a Photoshop file",
}


def looks_like(payload: bytes) -> str:
    """Guess the file type of bytes that are not a readable image."""
    for signature, name in _SIGNATURES.items():
        if payload.startswith(signature):
            return name
    if payload[257:262] == b"ustar":
        return "a tar archive"
    if payload[4:8] == b"ftyp":
        return "a damaged HEIC or AVIF, or a video"
    head = payload[:64]
    if not head.strip(b"\0"):
        return "zero bytes"
    text = head.decode(errors="ignore")
    is_whole = len(text.encode()) >= len(head) - 3  # the last character may be cut
    if is_whole and all(character.isprintable() or character.isspace() for character in text):
        return f"text: {text[:24]!r}"
    return "binary data"
