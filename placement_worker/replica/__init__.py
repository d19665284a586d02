"""The public, read-only copy of the resource book: columns, candidate search, and the follower that keeps it true.

`book.Book` holds the providers, `search.search` and `search.options` find hosts in it, `follower.Follower` feeds it
from the bus. Schedulers embed it; the REST API answers from it. It imports `bus` and nothing else of ours.
"""
