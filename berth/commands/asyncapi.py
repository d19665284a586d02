"""`berth asyncapi`: the AsyncAPI document of the bus."""

from __future__ import annotations

from typing import Annotated

import typer

from berth.commands.common import print_json
from berth.reference.asyncapi import document


def asyncapi(
    public: Annotated[bool, typer.Option("--public", help="Only messages for programs that are not berth's.")] = False,
) -> None:
    """Print the bus as an AsyncAPI 3 document.

    Each message, its key, its fields and its answer. `berth web` serves it at /api/v1/asyncapi.json.
    """
    print_json(document(public=public))
