"""Moving bytes in native code where it can be compiled, and in Python where not: one interface, the same effects."""
