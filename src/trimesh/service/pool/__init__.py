"""Replicas behind one name: the tasks around the state of `dispatch`."""
