"""The persistence of workers: database, migrations, the optimistic unit of work, the outbox."""
