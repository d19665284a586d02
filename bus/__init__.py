"""berth's message bus: contracts, topology, transports, consumer, outbox and worker lifecycle. It has no decisions of
the workers.
"""
