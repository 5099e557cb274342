"""What the declared keys say of themselves: their names, what they may hold, which are live, what is wrong.

Error texts, the example file and the list of live keys are read from here, so that none can differ from what
is checked.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from common.config_errors import Fault, Location, dotted, shown
from common.config_sections import ApiKey, Config, QueueSection


def section_models() -> dict[str, type[BaseModel]]:
    """Sections by name, without [[queues]]."""
    return {
        section: field.annotation
        for section, field in Config.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
    }


def sections() -> dict[str, dict[str, FieldInfo]]:
    return {section: model.model_fields for section, model in section_models().items()}


def fields() -> Iterator[tuple[str, str, FieldInfo]]:
    for section, keys in sections().items():
        for name, field in keys.items():
            yield section, name, field


def all_keys() -> list[str]:
    return [f"{section}.{name}" for section, name, _ in fields()] + ["queues"]


def dotted_keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """What a file sets, known or not: its sections, and section.key for what is in them."""
    for section, table in settings.items():
        yield dotted((section,))
        if isinstance(table, dict):
            yield from (dotted((section, name)) for name in table)


def extra(field: FieldInfo, name: str) -> object:
    extra = field.json_schema_extra
    return extra.get(name) if isinstance(extra, dict) else None


def is_text(annotation: object) -> bool:
    """Whether a variable holds this value without quotes: text, paths, words of a list."""
    kinds = _unwrapped(annotation)[0]
    return kinds in (str, Path) or get_origin(kinds) is Literal


def _unwrapped(annotation: object) -> tuple[Any, list[object]]:
    """The bare type and its bounds, without `Annotated` and `None`."""
    bounds: list[object] = []
    bare: Any = annotation
    while True:
        if get_origin(bare) is Annotated:
            bare, *metadata = get_args(bare)
            for item in metadata:
                bounds += item.metadata if isinstance(item, FieldInfo) else [item]
        elif get_origin(bare) in (Union, UnionType):
            bare = next(kind for kind in get_args(bare) if kind is not NoneType)
        else:
            return bare, bounds


def allowed(field: FieldInfo) -> str:
    """What a key may hold, in words."""
    said = extra(field, "allowed")
    if isinstance(said, str):
        return said
    bare, bounds = _unwrapped(field.annotation)
    bounds += field.metadata
    if bare is bool:
        return "true or false"
    if get_origin(bare) is Literal:
        words = [shown(word) for word in get_args(bare)]
        return f"{', '.join(words[:-1])} or {words[-1]}"
    low = next(getattr(bound, "ge") for bound in bounds if hasattr(bound, "ge"))  # noqa: B009
    high = next(getattr(bound, "le") for bound in bounds if hasattr(bound, "le"))  # noqa: B009
    return f"an integer from {low} to {high}"


# ---- error texts ----

# What API keys are written under, also in the wrong place and with a slip of the finger.
_KEY_NAMES = ("auth", "api_keys", "api_key", "keys", "key")
# How alike two names must be, from 0 to 1: "aut" and "apikeys" are, "limits" and "tls_key_path" are not.
_ALIKE = 0.8


def _held(location: Location, value: object) -> str:
    """A value for an error text; never an API key, which belongs into no log."""
    names = [*location, *_names_in(value)]
    if location[0] == "auth" or any(isinstance(name, str) and _means_a_key(name) for name in names):
        return f"a hidden {type(value).__name__}"
    return shown(value)


def _means_a_key(name: str) -> bool:
    return bool(difflib.get_close_matches(name.lower(), _KEY_NAMES, n=1, cutoff=_ALIKE))


def _names_in(value: object) -> Iterator[str]:
    """The names in a value of tables and lists, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield str(name)
            yield from _names_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _names_in(item)


def explained(error: ErrorDetails) -> tuple[str, str]:
    """Dotted key and error text of the first thing that is wrong."""
    fault = error.get("ctx", {}).get("error")
    if isinstance(fault, Fault):
        return fault.key, str(fault)
    location, value = error["loc"], error["input"]
    key = dotted(location)
    if error["type"] == "extra_forbidden":
        return key, unknown(location, value)
    holds = "unset" if error["type"] == "missing" else _held(location, value)
    return key, f"{key} is {holds}; allowed: {_allowed_at(location)}"


def _allowed_at(location: Location) -> str:
    """What the key at a location, or the list that it is in, may hold."""
    section, *rest = location
    names = [part for part in rest if isinstance(part, str)]
    if section == "queues":
        return allowed(QueueSection.model_fields[names[0]]) if names else "a list of tables, each with a name"
    return allowed(sections()[str(section)][names[0]]) if names else "a table"


def unknown(location: Location, value: object) -> str:
    """For a key that is none: the one that was meant, else all that there are."""
    section, name = location[0], str(location[-1])
    if len(location) == 1 or section not in Config.model_fields:
        # A section, or a key from the environment in a section that is none.
        known, name = list(Config.model_fields), str(section)
    elif section == "queues":
        known = list(QueueSection.model_fields)
    elif len(location) > 2:
        known = list(ApiKey.model_fields)
    else:
        known = list(sections()[str(section)])
    close = difflib.get_close_matches(name, known, n=1)
    allowed = f"did you mean {close[0]}?" if close else f"allowed: {', '.join(known)}"
    return f"{dotted(location)} is not known (it holds {_held(location, value)}); {allowed}"
