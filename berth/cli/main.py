"""The command line: nouns, and what can be done with each. A command is a function in `berth.cli`, imported when it is
called.

A worker is one of the commands, so imports of the others would slow the start of each worker.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct
from typer.core import TyperGroup

from berth.cli.common import explain, print_stop
from berth.cli.extras import add_absent
from berth.cli.options import as_command


class Noun(Struct, frozen=True):
    """A first word: its subject, and by the second word each command's function, `module:function`."""

    help: str
    verbs: Mapping[str, str]


INSTANCES, ACTIONS = "berth.cli.instance.instances", "berth.cli.instance.actions"
SEVERAL = "berth.cli.instance.several"
EDITS, OBJECTS = "berth.cli.objects.edits", "berth.cli.objects.objects"
HOSTS, CELLS = "berth.cli.fleet.hosts", "berth.cli.fleet.cells"
SERVICES, FENCES = "berth.cli.fleet.services", "berth.cli.fleet.fences"
DRAINS, METAL = "berth.cli.fleet.drains", "berth.cli.fleet.baremetal"
QUARANTINE, RECOVERY = "berth.cli.claims.quarantine", "berth.cli.claims.recovery"
PLACEMENT, REPAIRS = "berth.cli.claims.placement", "berth.cli.claims.placement_audit"
DATABASES, DEAD = "berth.cli.site.databases", "berth.cli.site.dead_letters"
NOVA, SERVING = "berth.cli.site.nova", "berth.cli.site.serving"

# By heading of the help: the first words. A command of one word names its function; a noun has commands below it.
TREE: Mapping[str, Mapping[str, str | Noun]] = {
    "Every day": {
        "status": "berth.cli.site.status:status",
        "boot": f"{INSTANCES}:boot",
        "list": f"{INSTANCES}:list_builds",
        "show": f"{INSTANCES}:show",
        "delete": f"{SEVERAL}:delete",
        "logs": "berth.cli.instance.logs:logs",
        "reboot": f"{ACTIONS}:reboot",
        "why": "berth.cli.instance.why:why",
    },
    "Instances": {
        "instance": Noun(
            "Machines: request, show, change, move and delete them.",
            {
                "create": f"{INSTANCES}:boot",
                "list": f"{INSTANCES}:list_builds",
                "show": f"{INSTANCES}:show",
                "delete": f"{SEVERAL}:delete",
                "logs": "berth.cli.instance.logs:logs",
                "why": "berth.cli.instance.why:why",
                "start": f"{ACTIONS}:start",
                "stop": f"{SEVERAL}:stop",
                "reboot": f"{ACTIONS}:reboot",
                "migrate": f"{ACTIONS}:migrate",
                "resize": f"{ACTIONS}:resize",
                "confirm": f"{ACTIONS}:confirm",
                "revert": f"{ACTIONS}:revert",
                "abort": f"{ACTIONS}:abort",
                "evacuate": f"{ACTIONS}:evacuate",
                "rebuild": f"{ACTIONS}:rebuild",
                "rescue": f"{ACTIONS}:rescue",
                "unrescue": f"{ACTIONS}:unrescue",
                "shelve": f"{ACTIONS}:shelve",
                "offload": f"{ACTIONS}:offload",
                "unshelve": f"{ACTIONS}:unshelve",
            },
        ),
        "action": Noun(
            "Requests about instances that were built.",
            {"list": f"{ACTIONS}:actions", "show": f"{ACTIONS}:show_action"},
        ),
        "group": Noun(
            "Server groups, which requests name.",
            {
                "list": f"{OBJECTS}:list_groups",
                "show": f"{EDITS}:show_group",
                "create": f"{EDITS}:create_group",
                "set": f"{EDITS}:set_group",
                "delete": f"{OBJECTS}:delete_groups",
            },
        ),
    },
    "What may be requested, and where it may go": {
        "flavor": Noun(
            "Flavors, which clients may request.",
            {
                "list": f"{OBJECTS}:list_flavors",
                "show": f"{OBJECTS}:show_flavor",
                "create": f"{EDITS}:create_flavor",
                "set": f"{EDITS}:set_flavor",
                "unset": f"{EDITS}:unset_flavor",
                "delete": f"{OBJECTS}:delete_flavors",
            },
        ),
        "quota": Noun(
            "Quotas of projects.",
            {
                "list": f"{EDITS}:list_quotas",
                "show": f"{EDITS}:show_quota",
                "set": f"{EDITS}:set_quota",
                "unset": f"{EDITS}:unset_quota",
                "delete": f"{OBJECTS}:delete_quotas",
            },
        ),
        "zone": Noun(
            "Availability zones, which aggregates make.",
            {"list": "berth.cli.fleet.zones:list_zones", "show": "berth.cli.fleet.zones:show_zone"},
        ),
        "aggregate": Noun(
            "Host aggregates.",
            {
                "list": f"{OBJECTS}:list_aggregates",
                "show": f"{OBJECTS}:show_aggregate",
                "create": f"{EDITS}:create_aggregate",
                "set": f"{EDITS}:set_aggregate",
                "unset": f"{EDITS}:unset_aggregate",
                "delete": f"{OBJECTS}:delete_aggregates",
                "add-host": f"{EDITS}:add_hosts",
                "remove-host": f"{EDITS}:remove_hosts",
                "drain": f"{DRAINS}:drain_aggregate",
            },
        ),
        "rule": Noun(
            "Scheduling rules: filters, weighers and their multipliers.",
            {
                "list": f"{OBJECTS}:list_rules",
                "show": f"{OBJECTS}:show_rules",
                "set": f"{EDITS}:set_rules",
                "unset": f"{EDITS}:unset_rules",
                "delete": f"{OBJECTS}:delete_rules",
            },
        ),
        "object": Noun(
            "All of these as one file, for `berth apply`.",
            {"export": f"{OBJECTS}:objects"},
        ),
    },
    "Fleet": {
        "host": Noun(
            "Hosts, and decisions about them.",
            {
                "list": f"{HOSTS}:list_hosts",
                "show": f"{HOSTS}:show_host",
                "metrics": "berth.cli.fleet.host_metrics:host_metrics",
                "enable": f"{HOSTS}:enable",
                "disable": f"{HOSTS}:disable",
                "maintenance": f"{HOSTS}:maintenance",
                "drain": f"{DRAINS}:drain_host",
                "fence": f"{HOSTS}:fence",
                "delete": f"{HOSTS}:delete_hosts",
            },
        ),
        "service": Noun(
            "Compute services.",
            {
                "list": f"{SERVICES}:list_services",
                "show": f"{SERVICES}:show_service",
                "drain": f"{DRAINS}:drain_service",
                "delete": f"{HOSTS}:delete_services",
            },
        ),
        "worker": Noun(
            "Workers, by their heartbeats.", {"list": f"{SERVICES}:list_workers", "show": f"{SERVICES}:show_worker"}
        ),
        "cell": Noun(
            "Cells: which are in use, and which take builds.",
            {
                "list": f"{CELLS}:list_cells",
                "show": f"{CELLS}:show_cell",
                "create": f"{CELLS}:create_cell",
                "enable": f"{CELLS}:enable_cell",
                "disable": f"{CELLS}:disable_cell",
                "drain": f"{DRAINS}:drain_cell",
                "remove": f"{CELLS}:remove_cell",
                "delete": f"{OBJECTS}:delete_cells",
            },
        ),
        "node": Noun(
            "Ironic's nodes, and their faults.",
            {
                "list": f"{METAL}:list_nodes",
                "show": f"{METAL}:show",
                "check": f"{METAL}:problems",
                "maintenance": f"{METAL}:quarantine",
                "enable": f"{METAL}:release",
            },
        ),
    },
    "What waits for a person, and what was decided": {
        "drain": Noun(
            "Drains: hosts that are emptied.",
            {
                "list": f"{DRAINS}:list_drains",
                "show": f"{DRAINS}:show",
                "pause": f"{DRAINS}:pause",
                "resume": f"{DRAINS}:resume",
                "cancel": f"{DRAINS}:cancel",
            },
        ),
        "fence": Noun(
            "Fences: hosts that are stated to be off.",
            {"list": f"{FENCES}:list_fences", "show": f"{FENCES}:show_fence", "cancel": f"{FENCES}:cancel_fences"},
        ),
        "recovery": Noun(
            "Cells whose database was restored, and what they would lose.",
            {
                "list": f"{RECOVERY}:list_recoveries",
                "show": f"{RECOVERY}:show",
                "accept": f"{RECOVERY}:accept",
                "without": f"{RECOVERY}:without",
            },
        ),
        "quarantine": Noun(
            "Machines that stay until an operator decides about them.",
            {
                "list": f"{QUARANTINE}:list_quarantine",
                "show": f"{QUARANTINE}:show_machine",
                "destroy": f"{QUARANTINE}:destroy",
                "protect": f"{QUARANTINE}:protect",
                "adopt": f"{QUARANTINE}:adopt",
            },
        ),
        "breaker": Noun(
            "Stopped destruction: too much was lost within a short time.",
            {
                "list": f"{QUARANTINE}:list_breakers",
                "show": f"{QUARANTINE}:show_breaker",
                "reset": f"{QUARANTINE}:reset",
            },
        ),
        "claim": Noun(
            "What placement has allocated on a host.",
            {"list": "berth.cli.claims.held:list_claims", "show": "berth.cli.claims.held:show_claim"},
        ),
        "dead-letter": Noun(
            "Messages that were dead-lettered, and the reasons.",
            {
                "list": f"{DEAD}:list_dead_letters",
                "show": f"{DEAD}:show",
                "replay": f"{DEAD}:replay",
                "delete": f"{DEAD}:purge",
            },
        ),
        "event": Noun(
            "The log of changes and decisions.", {"list": f"{OBJECTS}:list_events", "show": f"{OBJECTS}:show_event"}
        ),
        "check": "berth.cli.claims.checks:check",
        "audit": "berth.cli.claims.checks:audit",
        "explain": "berth.cli.site.nova_explain:explain",
    },
    "Access to the HTTP API": {
        "login": "berth.cli.session.login:login",
        "logout": "berth.cli.session.login:logout",
        "context": Noun(
            "Addresses of berth, each with a token.",
            {
                "list": "berth.cli.session.login:list_contexts",
                "show": "berth.cli.session.login:show_context",
                "use": "berth.cli.session.login:use",
            },
        ),
        "token": Noun(
            "Tokens of the HTTP API. Operators make and revoke them.",
            {
                "create": "berth.cli.session.tokens:create_token",
                "list": "berth.cli.session.tokens:list_tokens",
                "revoke": "berth.cli.session.tokens:revoke_token",
            },
        ),
    },
    "Site": {
        "up": "berth.cli.fleet.status:up",
        "run": "berth.cli.site.run:run_role",
        "serve": Noun(
            "Programs that run on beside the workers.", {"web": f"{SERVING}:web", "fencer": f"{SERVING}:fencer"}
        ),
        "config": "berth.cli.fleet.status:config",
        "apply": f"{OBJECTS}:apply",
        "permissions": "berth.cli.site.documents:permissions",
        "backup": f"{DATABASES}:backup",
        "restore": f"{DATABASES}:restore",
        "db": Noun(
            "The schemas of the database.",
            {
                "list": f"{DATABASES}:list_schemas",
                "show": f"{DATABASES}:show_schema",
                "check": f"{DATABASES}:check",
                "upgrade": f"{DATABASES}:upgrade",
            },
        ),
        "bus": Noun(
            "The address and owner of each bus.",
            {
                "list": f"{DATABASES}:list_buses",
                "show": f"{DATABASES}:show_bus",
                "url": f"{DATABASES}:url",
                "disown": f"{DATABASES}:disown",
                "asyncapi": "berth.cli.site.documents:asyncapi",
            },
        ),
    },
    "OpenStack": {
        "placement": Noun(
            "Placement on its own, and an operator's work on it.",
            {
                "serve": f"{PLACEMENT}:serve",
                "audit": f"{REPAIRS}:audit",
                "export": f"{REPAIRS}:export",
                "import": f"{REPAIRS}:import_",
                "set-host-cell": f"{REPAIRS}:set_host_cell",
                "openapi": f"{PLACEMENT}:openapi",
            },
        ),
        "nova": Noun(
            "In front of an OpenStack Nova.",
            {
                "serve": f"{NOVA}:serve",
                "trial": f"{NOVA}:trial",
                "settings": f"{NOVA}:translated_settings",
                "import": "berth.cli.objects.nova_import:import_nova",
                "export": "berth.cli.objects.nova_import:export_nova",
            },
        ),
    },
}
COMMANDS: Mapping[str, str | Noun] = {word: entry for words in TREE.values() for word, entry in words.items()}
PLAIN: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,  # in a table of columns long defaults and examples are cut off
}


class Words(TyperGroup):
    """Commands by their next word, each imported when it is looked up."""

    headings: Mapping[str, Mapping[str, str | Noun]]

    def list_commands(self, ctx: Any) -> list[str]:
        """All words, in the order of the help."""
        del ctx
        return [word for words in self.headings.values() for word in words]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command; None when there is none of this name, and then all are there for one to be suggested."""
        known = {word: entry for words in self.headings.values() for word, entry in words.items()}
        for word in [cmd_name] if cmd_name in known else known:
            if word not in self.commands:
                self.commands[word] = _made(word, known[word])
        return self.commands.get(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The words of the help, grouped."""
        widest = max(map(len, self.list_commands(ctx)))
        for heading, words in self.headings.items():
            found = [(word, self.get_command(ctx, word)) for word in words]
            with formatter.section(heading):
                width = formatter.width - 6 - widest
                formatter.write_dl([(word.ljust(widest), one.get_short_help_str(width)) for word, one in found])


def _words(headings: Mapping[str, Mapping[str, str | Noun]]) -> type[Words]:
    return type("Words", (Words,), {"headings": headings})


def load(word: str, verb: str = "") -> Any:
    """Import a command, or the second words of a noun."""
    entry = COMMANDS[word]
    return _made(verb, entry.verbs[verb]) if verb and isinstance(entry, Noun) else _made(word, entry)


def _made(word: str, entry: str | Noun) -> Any:
    alone = typer.Typer(**PLAIN)
    if isinstance(entry, Noun):
        cls = _words({"Commands": entry.verbs})
        alone.add_typer(typer.Typer(cls=cls, help=entry.help, no_args_is_help=True, **PLAIN), name=word)
    else:
        module, _, function = entry.partition(":")
        try:
            alone.command(word)(as_command(getattr(importlib.import_module(module), function)))
        except ModuleNotFoundError as fault:
            add_absent(alone, word, fault)
    return typer.main.get_group(alone).commands[word]


app = typer.Typer(
    name="berth",
    cls=_words(TREE),
    no_args_is_help=True,
    help="Place machines onto hosts, in cells. Exit status: 0 fine, 1 the answer is no, 2 wrong use or settings, "
    "3 nothing answers, 4 time ran out.",
    context_settings={"help_option_names": ["-h", "--help"]},
    **{**PLAIN, "add_completion": True},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from berth.version import version  # noqa: PLC0415  (a worker is one of the commands, and starts without it)

        sys.stdout.write(f"berth {version()}\n")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    config: Annotated[
        Path | None, typer.Option("--config", help="Settings file; else $BERTH_CONFIG, else ./berth.toml.")
    ] = None,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version, and the commit if it is known, and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
) -> None:
    del version
    context.obj = config


def main() -> None:
    """Entry point of the `berth` command."""
    try:
        app()
    except ModuleNotFoundError as fault:  # of an extra that is not installed; a defect is re-raised
        found = explain(fault)
        if found is None:
            raise
        print_stop(found)
        sys.exit(found.status)
