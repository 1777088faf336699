"""Pools: replicas behind one name. Tasks and handles around the state machine in `service/dispatch.py`."""
