"""Refuse a boolean where a number is wanted; pydantic takes `true` for 1."""

from collections.abc import Iterable, Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Strict, ValidationInfo, field_validator

TRUTH_COUNTS = "true is 1, false is 0"
"""Metadata of a type of scores: a check's answer is one."""

COLLECTIONS = (Mapping, list, tuple, set, frozenset)


class NumberFields(BaseModel):
    """A model whose numbers are none of `true` and `false`, in collections too."""

    @field_validator("*", mode="before")
    @classmethod
    def _is_no_switch(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name is not None and _has_switch(
            value, cls.model_fields[info.field_name].annotation
        ):
            raise ValueError("a number is wanted, not true or false")
        return value


def _has_switch(value: Any, annotation: Any) -> bool:
    """Whether a boolean stands where `annotation` wants a number, and not a boolean."""
    wanted = [*_types(annotation)]
    if isinstance(value, bool):
        return bool({int, float} & {*wanted}) and not {bool, Any} & {*wanted}
    if not isinstance(value, COLLECTIONS):
        return False
    of_mapping = isinstance(value, Mapping)
    items = value.values() if isinstance(value, Mapping) else value
    inside = [each for kind in wanted for each in _item_types(kind, of_mapping=of_mapping)]
    kinds = set(map(type, items)) if inside else set()  # of a million numbers none is looked at
    each = Union[tuple(inside)] if inside else Any  # noqa: UP007 - of types that are found here
    if bool in kinds and _has_switch(True, each):
        return True
    nested = any(issubclass(kind, COLLECTIONS) for kind in kinds)
    return nested and any(_has_switch(item, each) for item in items)


def _item_types(kind: Any, *, of_mapping: bool) -> list[Any]:
    """Return the types of what a collection holds; of a mapping, of its values."""
    origin = get_origin(kind)
    if not isinstance(origin, type) or not issubclass(origin, Iterable):
        return []
    if issubclass(origin, Mapping) is not of_mapping:
        return []
    return [each for each in get_args(kind)[-1 if of_mapping else 0 :] if each is not ...]


def _types(annotation: Any) -> Iterator[Any]:
    """Yield the types that a union or an alternative in it is made of."""
    if get_origin(annotation) in (Union, UnionType):
        for part in get_args(annotation):
            yield from _types(part)
    elif get_origin(annotation) is Annotated:
        kind, *metadata = get_args(annotation)
        # of a strict type pydantic itself refuses it, and names the place within the field
        strict = any(Strict(strict=True) in getattr(each, "metadata", ()) for each in metadata)
        if TRUTH_COUNTS not in metadata and not strict:
            yield from _types(kind)
    elif get_origin(annotation) is Literal:
        yield from map(type, get_args(annotation))
    else:
        yield annotation
