"""berth's message bus: contracts, topology, transports, consumer, outbox and worker lifecycle. Decides nothing."""
