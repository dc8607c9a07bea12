"""Credentials that others issue or keep: tokens of an identity provider, key files that a tool edits."""
