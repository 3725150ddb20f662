"""The service and the transports that carry it."""
