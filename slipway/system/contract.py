"""Base class of the typed records that stages and the service exchange as files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from slipway.system.errors import SlipwayError


class Contract(BaseModel):
    """Base class of all records: immutable, and strict about undeclared fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Copy the record with other field values.

        Unlike pydantic's own method, it drops cached properties, which describe the old values.
        """
        copied = super().model_copy(update=update, deep=deep)
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


Record = TypeVar("Record", bound=Contract)


def parse_record(
    kind: type[Record], path: Path, payload: bytes, error: type[SlipwayError], fix: str
) -> Record:
    """Parse the JSON content of a file to a record of class `kind`.

    `path` is only for messages. Raises an exception of the class `error`, whose message ends with
    `fix`, if the content is not JSON, of another format version, or does not fit the record.
    """
    return validate_record(kind, path, check_format(kind, path, payload, error, fix), error, fix)


def check_format(
    kind: type[Contract], path: Path, payload: bytes, error: type[SlipwayError], fix: str
) -> Any:
    """Parse JSON and check its format version, if `kind` declares one.

    The expected version is the literal type of the field `format_version`. Raises an exception of
    the class `error`, whose message ends with `fix`.
    """
    try:
        content = json.loads(payload)
    except ValueError as fault:
        raise error(f"{path} is not JSON: {fault}. {fix}") from fault
    field = kind.model_fields.get("format_version")
    if field is not None:
        (expected,) = get_args(field.annotation)
        found = content.get("format_version") if isinstance(content, dict) else None
        if found != expected:
            raise error(
                f"{path} has format version {found!r}, this Slipway reads version {expected}. {fix}"
            )
    return content


def validate_record(
    kind: type[Record], path: Path, content: Any, error: type[SlipwayError], fix: str
) -> Record:
    """Build a record of class `kind` from parsed JSON.

    Raises an exception of the class `error`, whose message ends with `fix`, if the content does not
    fit the record. `path` is only for the message.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as fault:
        raise error(f"{path} is not a valid {kind.__name__}: {fault}. {fix}") from fault
