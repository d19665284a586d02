from __future__ import annotations

import json

from jsonschema import Draft202012Validator

from placement_worker.rest.openapi import BODIES, QUERIES, document
from placement_worker.rest.routes import ROUTES
from placement_worker.rest.versions import NEWEST


def test_every_operation_of_the_newest_version_is_in_the_document() -> None:
    paths = document()["paths"]
    served = {(route.method.lower(), route.path) for route in ROUTES if route.until == NEWEST}
    assert {(method, path) for path, operations in paths.items() for method in operations} == served


def test_every_body_that_is_taken_has_a_schema() -> None:
    takes = {(route.method, route.path) for route in ROUTES if route.takes and route.until == NEWEST}
    assert takes == set(BODIES)
    assert set(QUERIES) <= {(route.method, route.path) for route in ROUTES}


def test_the_document_is_json_and_its_schemas_are_schemas() -> None:
    json.dumps(document())
    for schema in (*BODIES.values(), *QUERIES.values()):
        Draft202012Validator.check_schema(schema)


def test_operation_ids_are_unique() -> None:
    ids = [operation["operationId"] for path in document()["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids)
