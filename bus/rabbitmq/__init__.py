"""The RabbitMQ adapter: connections and channels from aio-pika, messages through aiormq below it.

aio-pika's own message and queue objects cost several times what aiormq does per message; see docs/decisions.
"""
