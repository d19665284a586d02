"""Commands about a site: its workers, databases and buses, dead letters, documents, the front of a Nova."""
