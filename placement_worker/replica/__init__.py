"""The public, read-only copy of placement: columns, candidate search, and the follower that keeps it up to date.

`replica.Replica` holds the providers, `search.search` and `search.options` find hosts in it, and `follower.Follower`
updates it from the bus. Schedulers embed this package, and the REST API answers from it. It imports `bus`
and `placement_worker.domain` alone.
"""
