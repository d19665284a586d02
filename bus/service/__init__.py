"""The lifecycle every worker runs through, and what each process needs: settings, logs, health, database."""
