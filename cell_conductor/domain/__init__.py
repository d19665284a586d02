"""The instance state machine: plain functions and frozen values.

The core: `instance` (the record), `events` (what can happen), `table` (which rule applies in which state) and `rules`
(builds and deletes), with what all rules share in `steps`. Moves are `move_rules`, `undo_rules` (the way back) and
`change_rules` (one machine, where it is), with the steps that they share in `move_steps` and their messages in
`move_events`; deletes of what moves are `delete_rules`. Fences are `fences` (the record), `fence_rules` (what one does
to an instance) and `closed_hosts`. Reports of hosts are `report`, judged by `proof` (what a record proves over) and
`breaker` (how much at once). `leases` are of compute services; `history` and `render` are for people.
"""
