"""Options of Placement that it requires, and that nothing here reads. Run by Nova's own interpreter."""

from placement.conf import database


def name_a_database() -> None:
    """Give the option that Placement's fixtures insist on a value; no database is opened."""
    for option in database.placement_db_opts:
        if option.name == "connection":
            option.default = "sqlite://"
