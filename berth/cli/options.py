"""Commands as plain functions: their options may be the fields of structs, and a coroutine is run to its end."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

import typer
from msgspec import NODEFAULT, Struct, structs

from berth.cli.common import run, settings_of

B = TypeVar("B", bound=Callable[..., Any])


def as_command(body: Callable[..., Any]) -> Callable[..., Any]:
    """The function that typer calls for a command: it reads the command's options from the signature.

    A parameter that is a struct becomes the options that its fields are, each declared as an option
    (`Annotated[type, typer.Option(...)]`, and its default); one that is Settings gets the settings in force. A
    coroutine is run, and a fault of it becomes a message and an exit status.
    """
    shown: list[Parameter] = []
    groups: dict[str, tuple[type[Struct], list[str]]] = {}
    reads = ""
    # Only a command whose module has imported them reads settings: the client alone has none.
    settings = getattr(sys.modules.get("berth.config.settings"), "Settings", None)
    for parameter in inspect.signature(body, eval_str=True).parameters.values():
        kind = parameter.annotation
        if kind is settings:
            reads = parameter.name
            shown.append(Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context))
        elif isinstance(kind, type) and issubclass(kind, Struct):
            fields = _fields(kind)
            groups[parameter.name] = kind, [field.name for field in fields]
            shown += fields
        else:
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
        named = dict(given)
        if reads:
            named[reads] = settings_of(named.pop("context"))
        for name, (kind, fields) in groups.items():
            named[name] = kind(**{field: named.pop(field) for field in fields})
        return named

    @functools.wraps(body)
    def called(**given: Any) -> Any:
        if inspect.iscoroutinefunction(body):
            run(lambda: body(**arguments(given)))
        return body(**arguments(given))

    declared: Any = called
    declared.__signature__ = inspect.Signature(shown)
    declared.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return called


def _fields(kind: type[Struct]) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is NODEFAULT else field.default,
            annotation=hints[field.name],
        )
        for field in structs.fields(kind)
    ]


class CommandGroup(typer.Typer):
    """Commands with a common first word."""

    def command(self, *args: Any, **named: Any) -> Callable[[B], B]:
        """Make a command of a function, which stays what it is for those that call it."""
        register = super().command(*args, **named)

        def registered(body: B) -> B:
            register(as_command(body))
            return body

        return registered

    def default(self, body: B) -> B:
        """Make of a function the command that the first word is without a second."""
        whole = as_command(body)

        @functools.wraps(whole)
        def called(**given: Any) -> Any:
            return None if given["context"].invoked_subcommand is not None else whole(**given)

        declared: Any = called
        declared.__signature__ = inspect.signature(whole)
        self.callback(invoke_without_command=True)(called)
        return body
