"""What callers are told, without the server's file system: the log has the whole paths.

A path below the folder that holds `serving/` is said from there, of any other its last part alone.
"""

import re
from typing import Any

from serving.settings import ROOT, Settings

# Two parts or more: of one, as `/predict`, are the service's own addresses, and so is all below `/v2`.
_ABSOLUTE = re.compile(
    r"""(?<![^\s'"`(\[{<=:,;])/(?!v2/)(?:[^\s/'"`()\[\]{}<>:;,]+/)+([^\s/'"`()\[\]{}<>:;,]*)"""
)
_ENDS = r"(?![\w.-]*\w)"  # of the name of a folder


def without_server_paths(content: Any, settings: Settings) -> Any:
    """A text, or all texts of JSON, as callers may have it; keys stay as they are."""
    if isinstance(content, dict):
        return {key: without_server_paths(value, settings) for key, value in content.items()}
    if isinstance(content, list):
        return [without_server_paths(value, settings) for value in content]
    return _told(content, settings) if isinstance(content, str) and "/" in content else content


def _told(text: str, settings: Settings) -> str:
    text = text.replace(f"{ROOT}/", "")
    text = re.sub(re.escape(str(ROOT)) + _ENDS, "the service's folder", text)
    for path in sorted(settings.paths(), key=lambda path: -len(str(path))):
        if path.name:
            text = text.replace(
                str(path), f"…/{path.name}"
            )  # its folders may have names with spaces, which no pattern finds
    return _ABSOLUTE.sub(r"…/\1", text)
