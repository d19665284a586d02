"""The parts that tests share: private servers, fresh databases, brokers to break. See fixtures.py."""
