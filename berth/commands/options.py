"""Options of a command as a struct: its fields are the options, with their help, bounds and defaults."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar, get_type_hints

from msgspec import NODEFAULT, Struct, structs

R = TypeVar("R")


def with_options(command: Callable[..., R]) -> Callable[..., R]:
    """Give a command the fields of its argument `options`, a struct, as options of its own; typer reads the signature.

    A field is declared like an option: `Annotated[type, typer.Option(...)]`, and its default.
    """
    signature = inspect.signature(command, eval_str=True)
    kind: type[Struct] = get_type_hints(command)["options"]
    hints = get_type_hints(kind, include_extras=True)
    own = [parameter for parameter in signature.parameters.values() if parameter.name != "options"]
    fields = [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is NODEFAULT else field.default,
            annotation=hints[field.name],
        )
        for field in structs.fields(kind)
    ]

    @functools.wraps(command)
    def called(*arguments: Any, **named: Any) -> R:
        options = kind(**{field.name: named.pop(field.name) for field in fields})
        return command(*arguments, **named, options=options)

    declared: Any = called
    declared.__signature__ = signature.replace(parameters=[*own, *fields])
    declared.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *fields)}
    return called
