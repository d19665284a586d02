"""The instance state machine: plain functions and frozen values.

The core: `instance` (the record), `events` (what can happen to it), `table` (the rule for each state and event) and
`rules` (builds and deletes), with the parts that all rules share in `steps`. Moves are `move_rules`, `way_back` (how
they are rolled back) and `departure_rules` (to and from other cells), with
the steps that they share in `move_steps` and their messages in `move_events`; deletes of moving instances are
`delete_rules`. Fences are `fences` (the record, and the hosts on which nothing is started) and `fence_rules` (the
effect of a fence on an instance). Reports of hosts are `report` (which also says which machines a record proves to be
over), and `breaker` how many of their differences take effect at once. `leases` are of compute services.
"""
