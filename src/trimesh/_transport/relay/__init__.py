"""Sessions between two hosts: many byte streams over one TLS connection at a time, which may break and come again."""
