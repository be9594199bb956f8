"""Carriage over MQTT, and the durable queues at both ends of it."""
