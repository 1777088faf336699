"""Slots and replay buffers: the tasks that wait for them, their handles, and the actors beside them."""
