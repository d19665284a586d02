"""From a request to ranked hosts: the query, the search in the replica, filters and weights. Pure."""
