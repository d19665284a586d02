"""The operations about what operators define at run time: flavors, aggregates, quotas, groups, rules, cells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from berth.client.call import ApiCall, operation
from berth.client.types import ChangeBody, GroupView, ObjectList, QuotaUse, Zone
from bus.contracts.base import Label, Reason, Version, Word
from bus.contracts.objects import (
    Aggregate,
    CellDecision,
    Flavor,
    GroupDefinition,
    ObjectKind,
    ObjectLogEntry,
    ObjectsChanged,
    ProjectQuota,
    SchedulingRules,
    StoredObject,
)


class ObjectChangeOptions(Struct, frozen=True, kw_only=True):
    """How one object is changed. if_version: only if the object has this version (0: only if there is none); force:
    also if something stands against it that an operator may decide; dry_run: only report what would change.
    """

    reason: Reason | None = None
    if_version: Version | None = None
    force: bool | None = None
    dry_run: bool | None = None


PLAIN = ObjectChangeOptions()


def _change(
    method: str, path: str, name: str, options: ObjectChangeOptions, body: object = None
) -> ApiCall[ObjectsChanged]:
    query = {field: getattr(options, field) for field in options.__struct_fields__}
    key = "project" if "{project}" in path else "name"
    return ApiCall(method, path, ObjectsChanged, at={key: name}, query=query, body=body)


class ObjectOperations:
    """Objects of every kind, and the log of their changes."""

    @operation
    def list_objects(self, *, kind: ObjectKind | None = None, name: Label | None = None) -> ApiCall[ObjectList]:
        """Objects, in order of kind and name: all, of one kind, or one."""
        return ApiCall("GET", "/objects", ObjectList, query={"kind": kind, "name": name})

    @operation
    def change_objects(self, body: ChangeBody) -> ApiCall[ObjectsChanged]:
        """Change many objects, all or none."""
        return ApiCall("POST", "/objects", ObjectsChanged, body=body)

    @operation
    def list_changes(
        self,
        *,
        kind: ObjectKind | None = None,
        name: Label | None = None,
        before: Version | None = None,
        before_object: str | None = None,
        limit: int | None = None,
    ) -> ApiCall[tuple[ObjectLogEntry, ...]]:
        """The log of changes, newest first. before, before_object: the revision and KIND/NAME of a page's last entry,
        for the page after it.
        """
        query = {"kind": kind, "name": name, "before": before, "before_object": before_object, "limit": limit}
        return ApiCall("GET", "/objects/log", tuple[ObjectLogEntry, ...], query=query)

    @operation
    def list_zones(self) -> ApiCall[tuple[Zone, ...]]:
        """Availability zones by name."""
        return ApiCall("GET", "/zones", tuple[Zone, ...])

    @operation
    def list_quotas(self) -> ApiCall[tuple[QuotaUse, ...]]:
        """Quotas with what is used beside the limits."""
        return ApiCall("GET", "/quotas", tuple[QuotaUse, ...])

    @operation
    def show_quota(self, project: Word) -> ApiCall[QuotaUse]:
        """The quota of one project, and its usage."""
        return ApiCall("GET", "/quotas/{project}", QuotaUse, at={"project": project})

    @operation
    def list_flavors(self) -> ApiCall[ObjectList]:
        """The flavors by name."""
        return ApiCall("GET", "/flavors", ObjectList)

    @operation
    def show_flavors(self, name: Label) -> ApiCall[StoredObject]:
        """A flavor."""
        return ApiCall("GET", "/flavors/{name}", StoredObject, at={"name": name})

    @operation
    def set_flavors(self, name: Label, body: Flavor, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Make a flavor, or replace the whole of it."""
        return _change("PUT", "/flavors/{name}", name, options, body)

    @operation
    def patch_flavors(
        self, name: Label, body: Mapping[str, Any], options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Change the named fields of a flavor (JSON merge patch: None removes one)."""
        return _change("PATCH", "/flavors/{name}", name, options, body)

    @operation
    def delete_flavors(self, name: Label, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Delete a flavor."""
        return _change("DELETE", "/flavors/{name}", name, options)

    @operation
    def list_aggregates(self) -> ApiCall[ObjectList]:
        """The aggregates by name."""
        return ApiCall("GET", "/aggregates", ObjectList)

    @operation
    def show_aggregates(self, name: Label) -> ApiCall[StoredObject]:
        """An aggregate."""
        return ApiCall("GET", "/aggregates/{name}", StoredObject, at={"name": name})

    @operation
    def set_aggregates(
        self, name: Label, body: Aggregate, options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Make an aggregate, or replace the whole of it."""
        return _change("PUT", "/aggregates/{name}", name, options, body)

    @operation
    def patch_aggregates(
        self, name: Label, body: Mapping[str, Any], options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Change the named fields of an aggregate (JSON merge patch: None removes one)."""
        return _change("PATCH", "/aggregates/{name}", name, options, body)

    @operation
    def delete_aggregates(self, name: Label, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Delete an aggregate."""
        return _change("DELETE", "/aggregates/{name}", name, options)

    @operation
    def set_quotas(
        self, project: Word, body: ProjectQuota, options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Make a quota, or replace the whole of it."""
        return _change("PUT", "/quotas/{project}", project, options, body)

    @operation
    def patch_quotas(
        self, project: Word, body: Mapping[str, Any], options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Change the named fields of a quota (JSON merge patch: None removes one)."""
        return _change("PATCH", "/quotas/{project}", project, options, body)

    @operation
    def delete_quotas(self, project: Word, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Delete a quota."""
        return _change("DELETE", "/quotas/{project}", project, options)

    @operation
    def list_groups(self) -> ApiCall[ObjectList]:
        """The server groups by name."""
        return ApiCall("GET", "/groups", ObjectList)

    @operation
    def show_groups(self, name: Label) -> ApiCall[GroupView]:
        """A server group, PROJECT/NAME."""
        return ApiCall("GET", "/groups/{name}", GroupView, at={"name": name})

    @operation
    def set_groups(
        self, name: Label, body: GroupDefinition, options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Make a server group, PROJECT/NAME, or replace the whole of it."""
        return _change("PUT", "/groups/{name}", name, options, body)

    @operation
    def patch_groups(
        self, name: Label, body: Mapping[str, Any], options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Change the named fields of a server group, PROJECT/NAME (JSON merge patch: None removes one)."""
        return _change("PATCH", "/groups/{name}", name, options, body)

    @operation
    def delete_groups(self, name: Label, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Delete a server group, PROJECT/NAME."""
        return _change("DELETE", "/groups/{name}", name, options)

    @operation
    def list_rules(self) -> ApiCall[ObjectList]:
        """The scheduling rules by name."""
        return ApiCall("GET", "/rules", ObjectList)

    @operation
    def show_rules(self, name: Label) -> ApiCall[StoredObject]:
        """The scheduling rules, `default`."""
        return ApiCall("GET", "/rules/{name}", StoredObject, at={"name": name})

    @operation
    def set_rules(
        self, name: Label, body: SchedulingRules, options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Make the scheduling rules, `default`, or replace the whole of it."""
        return _change("PUT", "/rules/{name}", name, options, body)

    @operation
    def patch_rules(
        self, name: Label, body: Mapping[str, Any], options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Change the named fields of the scheduling rules, `default` (JSON merge patch: None removes one)."""
        return _change("PATCH", "/rules/{name}", name, options, body)

    @operation
    def delete_rules(self, name: Label, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Delete the scheduling rules, `default`."""
        return _change("DELETE", "/rules/{name}", name, options)

    @operation
    def set_cells(
        self, name: Label, body: CellDecision, options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Make a decision about a cell, or replace the whole of it."""
        return _change("PUT", "/cells/{name}", name, options, body)

    @operation
    def patch_cells(
        self, name: Label, body: Mapping[str, Any], options: ObjectChangeOptions = PLAIN
    ) -> ApiCall[ObjectsChanged]:
        """Change the named fields of a decision about a cell (JSON merge patch: None removes one)."""
        return _change("PATCH", "/cells/{name}", name, options, body)

    @operation
    def delete_cells(self, name: Label, options: ObjectChangeOptions = PLAIN) -> ApiCall[ObjectsChanged]:
        """Delete a decision about a cell."""
        return _change("DELETE", "/cells/{name}", name, options)
