"""Moves bytes between processes: rings, lanes, connectors. Knows nothing of requests' meaning, models or HTTP."""
