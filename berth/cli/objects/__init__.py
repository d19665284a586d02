"""Commands about what operators define: flavors, rules, quotas, aggregates, groups."""
