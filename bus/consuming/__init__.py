"""Taking batches from queues: the consumer, what handlers return, retries, dead letters."""
