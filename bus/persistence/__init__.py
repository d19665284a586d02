"""How workers keep their state: database, migrations, the optimistic unit of work, the outbox."""
