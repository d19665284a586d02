"""HTTP for people and programs that do not use AMQP: `/api/v1`, and pages over it. A client of the API bus."""
