"""Pools: replicas behind one name; tasks and handles around the state machine of `dispatch`."""
