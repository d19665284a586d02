"""oslo.messaging as Nova's services use it: envelopes, methods, queues."""
