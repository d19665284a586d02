"""Commands as plain functions: their options may be the fields of structs, and a coroutine is run to its end."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from inspect import Parameter
from typing import Any, TypeVar, get_type_hints

import typer
from msgspec import NODEFAULT, Struct, structs

from berth.cli.output import called

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
    takes = ""  # the name of a parameter that is the context
    for parameter in inspect.signature(body, eval_str=True).parameters.values():
        kind = parameter.annotation
        if _is_settings(kind):
            reads = parameter.name
        elif kind is typer.Context:
            takes = parameter.name
        elif isinstance(kind, type) and issubclass(kind, Struct):
            fields = _fields(kind)
            groups[parameter.name] = kind, [field.name for field in fields]
            shown += fields
        else:
            shown.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    shown.append(Parameter("context", Parameter.KEYWORD_ONLY, annotation=typer.Context))

    def arguments(given: Mapping[str, Any]) -> dict[str, Any]:
        named = dict(given)
        context = named.pop("context")
        if reads:
            from berth.cli.common import settings_of  # noqa: PLC0415  (see `_is_settings`)

            named[reads] = settings_of(context)
        if takes:
            named[takes] = context
        for name, (kind, fields) in groups.items():
            named[name] = kind(**{field: named.pop(field) for field in fields})
        return named

    @functools.wraps(body)
    def command(**given: Any) -> Any:
        running = called.set(given["context"])
        try:
            if inspect.iscoroutinefunction(body):
                from berth.cli.common import run  # noqa: PLC0415  (see `_is_settings`)

                run(lambda: body(**arguments(given)))
            return body(**arguments(given))
        finally:
            called.reset(running)

    declared: Any = command
    declared.__signature__ = inspect.Signature(shown)
    declared.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return command


def _is_settings(kind: Any) -> bool:
    """By its name: a command that calls the HTTP API imports neither the settings of all workers nor their libraries,
    which would be most of its time.
    """
    return isinstance(kind, type) and (kind.__module__, kind.__name__) == ("berth.config.settings", "Settings")


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
